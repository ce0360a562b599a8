"""Other engines as workers of the conductor: plain vLLM and SGLang servers behind their own HTTP APIs."""
