"""Tests that run in guests with soft-RoCE devices, and what boots the guests."""
