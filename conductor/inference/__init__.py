"""The parts shared by HTTP and gRPC: request validation and preparation, sequences as text, open calls, limits."""
