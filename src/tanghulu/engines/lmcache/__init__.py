"""LMCache's second level: objects that its server moves out of host memory lie in the store."""
