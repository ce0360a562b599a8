"""The chunks and decisions of a node, without I/O: space, leases, and unreported changes."""
