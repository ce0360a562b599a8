"""Routing policies, which choose a request's workers: pure, with a common contract; see ``base``."""
