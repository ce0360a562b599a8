"""Values on their way into the node: puts by each carrier of their bytes, and copies ordered by the master."""
