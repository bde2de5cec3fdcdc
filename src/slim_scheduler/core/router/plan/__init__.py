"""The linear program of the bound, its plans, and the router that follows them."""
