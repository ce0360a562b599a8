"""Copies ordered by the master, pulled from other nodes."""
