"""A cluster of transfer engines in virtual time, and the tests that run it."""
