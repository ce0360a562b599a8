"""Tests of the store as a whole, with real processes."""
