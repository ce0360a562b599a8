"""Several conductors side by side: each reports its requests to the others."""
