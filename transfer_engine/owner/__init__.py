"""A process's segment, offered to peers over all of its transports."""
