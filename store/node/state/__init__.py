"""What a node holds and decides, without I/O: chunks, space, leases, and what the master has to be told."""
