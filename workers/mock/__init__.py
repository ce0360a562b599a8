"""The engine without a model: it takes as long as a real one, and its KV can be checked."""
