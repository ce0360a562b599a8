"""Tests of the master: its decisions in virtual time, its edges in this process, its process."""
