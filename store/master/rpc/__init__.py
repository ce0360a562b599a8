"""The master's edges: calls and streams of the directory and of the membership."""
