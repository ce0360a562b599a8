"""Tests of GPU memory in transfers."""
