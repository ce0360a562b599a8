"""A node's communication with the master: registration, and reports of its chunks."""
