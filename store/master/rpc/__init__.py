"""The master's calls and streams, of the directory and of the membership, over gRPC and the fast lane."""
