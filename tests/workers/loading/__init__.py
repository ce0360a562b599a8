"""Tests of the way from a model on disk to a runner."""
