"""Puts on their way into the node, by each carrier of their bytes."""
