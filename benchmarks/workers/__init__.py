"""Benchmarks of workers: the engine on CPUs and GPUs, and what reuse of a prefix is worth."""
