"""The prefix index, which knows the holders of each prefix, and the events that feed it."""
