"""Explanations of cache misses: where each prompt token of a request came from, or why it was computed."""
