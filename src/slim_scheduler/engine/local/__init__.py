"""The live host of one process."""
