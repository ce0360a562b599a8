"""Puts on their way into the node, by each of the ways that their bytes take."""
