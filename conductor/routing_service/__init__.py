"""Routing as a separate service: policies, index and load for gateways of any engine; see ``main``."""
