"""Tests of the store node's decisions, in virtual time, and of a real node's."""
