"""Shared memory: the peer maps the segment and copies by itself."""
