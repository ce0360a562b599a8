"""The ``tanghulu`` command: all processes, the embedded cluster, the chat, and administration of the store."""
