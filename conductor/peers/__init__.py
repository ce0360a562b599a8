"""Conductors side by side: each tells the others of its requests."""
