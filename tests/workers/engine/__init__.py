"""Tests of continuous batching."""
