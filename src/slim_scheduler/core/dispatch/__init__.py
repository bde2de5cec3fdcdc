"""The router's side of the loop: global FIFO, servers, items in flight, recovery, admission."""
