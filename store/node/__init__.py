"""A store node: its segment, the chunks in it, and their way in and out."""
