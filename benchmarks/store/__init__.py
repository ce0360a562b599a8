"""Benchmarks of the store: its calls beside peers and the machine's limits, its nodes, and whole clusters."""
