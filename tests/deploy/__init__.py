"""Tests of what stands in deploy/: read by the tools that will read it, and run where that is possible here."""
