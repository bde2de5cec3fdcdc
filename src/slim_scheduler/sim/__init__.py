"""The simulated host: the same two machines as live, under a deterministic event heap."""
