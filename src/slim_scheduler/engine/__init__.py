"""The live host: clock, devices, execution threads, probes, and `SlimEngine`, which serves in process."""
