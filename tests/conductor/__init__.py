"""Tests of the conductor, with fake workers behind it or a real master beside it."""
