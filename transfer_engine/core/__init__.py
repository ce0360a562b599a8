"""The words and pure decisions that client, owner and transports of the transfer engine share."""
