"""Tests of inference over gRPC."""
