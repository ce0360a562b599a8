"""Tests of the prefix index and of the events that feed it."""
