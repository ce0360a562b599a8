"""LMCache's second level: objects that its server moves out of host memory are kept in the store."""
