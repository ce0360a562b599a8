"""Anthropic's Messages API: its bodies, and the message that answers one, streamed or whole."""
