"""Replay of request traces in virtual time through the conductor's own policies; see ``main`` for the command."""
