"""Tests of what HTTP ports share."""
