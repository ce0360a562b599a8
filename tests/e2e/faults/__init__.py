"""Faults of every kind at every moment, on clusters of real processes."""
