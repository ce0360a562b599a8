"""Tests of the router in front of several pools."""
