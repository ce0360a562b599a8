"""Tests of the two carriers of the schema."""
