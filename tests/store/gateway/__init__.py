"""Tests of the store over HTTP."""
