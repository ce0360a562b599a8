"""Tests of the administrator's commands."""
