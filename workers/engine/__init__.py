"""Continuous batching: requests, scheduler, block pool and the loop that steps them."""
