"""Tests of tool calls and reasoning."""
