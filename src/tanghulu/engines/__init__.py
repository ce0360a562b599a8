"""Connectors: what runs tanghulu inside other inference engines, a folder an engine and what they share."""
