"""Tests with vLLM in an environment of its own (tools/engine_venv.py)."""
