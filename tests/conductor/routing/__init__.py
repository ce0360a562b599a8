"""Tests of routing policies and of what they are shown."""
