"""The two carriers of one schema: gRPC for control, length-prefixed frames (the fast lane) for the hot path."""
