"""Sessions with conductors: requests in, outputs of each step out."""
