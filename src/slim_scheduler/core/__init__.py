"""The pure core: every decision, no I/O, no clock, no torch."""
