"""The engine without a model: it takes as long as one would, and its KV can be checked."""
