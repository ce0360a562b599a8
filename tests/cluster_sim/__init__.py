"""Conductors, workers and their store in virtual time: production classes, faults, and the tests that run them."""
