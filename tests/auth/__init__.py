"""Tests of credentials, tenants, tokens and their rights."""
