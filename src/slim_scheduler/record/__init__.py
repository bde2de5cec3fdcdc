"""The one event record of a run, and everything that derives from it."""
