"""Tests of the connectors; those that start an engine are marked ``engine_vllm`` (``make test-engines``)."""
