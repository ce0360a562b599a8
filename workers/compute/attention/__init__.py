"""Attention over the paged cache, a backend a file."""
