"""Tests of KV on its way in and out of the cache."""
