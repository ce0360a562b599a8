"""Ranges of a segment or of a file: which are free, and who has to go when one is needed."""
