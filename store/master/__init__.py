"""The master: who is alive, which node holds which key, where to put the next chunk, and a stream of what changed."""
