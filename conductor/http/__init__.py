"""The HTTP side of the conductor: OpenAI's API, SGLang's /generate, administration."""
