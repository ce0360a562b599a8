"""Tests of what connectors share, in virtual time and without an engine."""
