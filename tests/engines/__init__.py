"""Tests of the connectors; what starts engines is marked ``engine_vllm``, ``engine_lmcache``, ``engine_sglang``:
``make test-engines``."""
