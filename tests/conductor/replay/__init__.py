"""Tests of replayed traces, in virtual time and live."""
