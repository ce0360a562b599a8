"""Benchmarks of the conductor: decisions, the prefix index, live routing, and what large bodies cost others."""
