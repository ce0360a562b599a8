"""Tests of tensor parallelism."""
