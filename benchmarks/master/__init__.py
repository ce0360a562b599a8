"""Benchmarks of the directory: what a master's work costs, what could hold it instead, how soon it is rebuilt."""
