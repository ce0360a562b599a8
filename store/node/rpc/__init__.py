"""The node's edges: the fast lane, gRPC, sessions of clients, metrics."""
