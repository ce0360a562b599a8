"""The vocabulary that conductors and workers share: requests, outputs, loads and the messages of their sessions."""
