"""The prefix index, which maps each prefix to its holders, and the events that feed it."""
