"""Tests of LMCache's adapter: they start programs in LMCache's own environment."""
