"""What the HTTP edges share: the server inside a process's event loop, and typed errors as answers."""
