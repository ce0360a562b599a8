"""Tests of the engine without a model."""
