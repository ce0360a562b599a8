"""Tests of each transport: the contract, and what is particular to it."""
