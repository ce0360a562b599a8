"""The vocabulary shared by conductors and workers: requests, outputs, loads and the messages of their sessions."""
