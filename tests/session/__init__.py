"""Tests of the words and messages that conductors and workers share."""
