"""Tests of a whole cluster, started as its users start it."""
