"""Tests of the node's SSD tier."""
