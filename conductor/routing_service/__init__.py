"""Routing as a service of its own: policies, index and load for gateways of any engine; see ``main``."""
