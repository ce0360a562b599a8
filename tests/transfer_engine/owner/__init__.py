"""Tests of the owner's side of a segment."""
