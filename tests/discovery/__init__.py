"""Tests of discovery's implementations and of their pure parts."""
