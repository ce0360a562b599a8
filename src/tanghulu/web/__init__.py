"""Shared parts of the HTTP APIs: the server inside a process's event loop, and typed errors as answers."""
