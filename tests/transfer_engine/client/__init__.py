"""Tests of transfers as a client makes them."""
