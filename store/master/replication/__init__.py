"""Replication: chunks that should be held by more nodes or by fewer, decided without I/O."""
