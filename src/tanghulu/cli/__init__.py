"""The ``tanghulu`` command: all processes, the embedded cluster, the chat, the store's administration."""
