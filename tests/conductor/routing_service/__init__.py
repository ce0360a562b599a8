"""Tests of routing as a service for other engines."""
