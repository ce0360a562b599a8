"""The master: live instances, holders of keys, placement of new chunks, and a stream of changes."""
