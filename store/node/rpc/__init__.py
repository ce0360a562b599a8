"""The node's edges: the fast lane, sessions of clients, metrics."""
