"""The HTTP API of the conductor: OpenAI's routes, SGLang's /generate, administration."""
