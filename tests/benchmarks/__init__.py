"""Tests of the benchmarks' own machinery."""
