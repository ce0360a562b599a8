"""Vocabulary and pure decisions shared by client, owner and transports of the transfer engine."""
