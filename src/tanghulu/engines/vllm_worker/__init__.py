"""``tanghulu vllm-worker``: vLLM's engine behind the conductor. ``llm`` is the only file here that imports vLLM."""
