"""Tests of the arithmetic of a step."""
