"""The node's SSD tier: demotion of chunks, their layout in the file, and promotion."""
