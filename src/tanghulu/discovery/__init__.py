"""Who is alive and where: instances under leases, behind one interface with several carriers."""
