"""Slim Scheduler: serves one slimmable network at several widths on several unequal devices."""
