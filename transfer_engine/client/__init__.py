"""Transfers as a client makes them: requests, the state of a transfer batch, links to a peer."""
