"""Which holder has which prefix: the prefix index and the events that feed it."""
