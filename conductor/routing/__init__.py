"""Routing: views of requests, workers and links, the costs of their work, and the policies that choose among them."""
