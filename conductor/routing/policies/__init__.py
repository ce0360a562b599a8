"""Routing policies, which choose a request's workers: pure, under one contract; see ``base``."""
