"""Shared parts of all connectors: names of blocks, decisions without I/O, and the transfers; no engine, no torch."""
