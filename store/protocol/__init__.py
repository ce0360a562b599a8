"""The types, messages and shared-memory layouts common to node, master and client of the store."""
