"""The same system on several machines: one Ray actor per server, one Dispatcher at the router, blocks in between."""
