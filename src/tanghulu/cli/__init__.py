"""The ``tanghulu`` command: every process, the embedded cluster, the chat, the store's administration."""
