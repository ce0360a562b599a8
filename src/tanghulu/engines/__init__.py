"""Connectors that run tanghulu inside other inference engines, one folder per engine plus a common one."""
