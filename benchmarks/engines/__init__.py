"""Engines of others with a connector each: tanghulu's beside those that vLLM brings, in one run."""
