"""Tests of what node, master and client of the store share."""
