"""Discovery: the live instances and their addresses, under leases, behind one interface with several carriers."""
