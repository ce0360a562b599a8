"""Tests of templates, detokenization and stop strings."""
