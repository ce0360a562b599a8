"""Tests of the pure decisions that both sides of a transfer share."""
