"""Tests of devices and of the pairs that they make."""
