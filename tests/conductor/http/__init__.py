"""Tests of the conductor's HTTP routes."""
