"""Mooncake's Python store API: its contract, and the connectors written against it."""
