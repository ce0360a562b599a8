"""OpenAI's Responses API: its bodies and items, its events, and the responses kept for later turns."""
