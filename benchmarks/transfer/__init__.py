"""Benchmarks of the transfer engine, beside peers and the plain limits of the machine."""
