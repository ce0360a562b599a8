"""Tests of what every process stands on."""
