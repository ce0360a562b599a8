"""OpenAI's Responses API: its bodies and items, its events, and the responses that are kept for later turns."""
