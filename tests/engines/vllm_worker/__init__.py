"""The worker that computes with vLLM."""
