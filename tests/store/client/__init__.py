"""Tests of the store's client: its logic by itself, and what it promises with real processes."""
