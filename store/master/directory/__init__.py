"""The directory without I/O: the holders of keys, calls waiting for keys, and the events for followers."""
