"""A store node: its segment, the chunks in it, and their ways in and out."""
