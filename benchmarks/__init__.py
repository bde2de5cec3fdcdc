"""Performance claims as code: each module's `run()` measures both sides in one process and run."""
