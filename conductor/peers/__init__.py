"""Conductors side by side: what each tells the others of its requests."""
