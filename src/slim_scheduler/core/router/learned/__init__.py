"""The learned router: what it sees, its networks in NumPy, and how it decides."""
