"""Copies that the master orders, pulled from other nodes."""
