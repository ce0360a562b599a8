"""Tests of the workers on tiny models, mocks and SmolLM2."""
