"""The directory without I/O: which node holds which key, who waits for a key, what followers are told."""
