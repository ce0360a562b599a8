"""Tests of a request's way through the conductor: its states and the queue."""
