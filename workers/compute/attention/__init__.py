"""Attention over the paged cache, one backend per file."""
