"""Tests of conductors side by side."""
