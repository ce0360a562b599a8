"""Ranges of a segment or of a file: the free ones, and the residents to evict when one is needed."""
