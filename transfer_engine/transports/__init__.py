"""The transports: a folder each, with its client and its listener."""
