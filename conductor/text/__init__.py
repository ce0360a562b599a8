"""Text to tokens and back: chat templates, the served model, detokenizer, stop strings."""
