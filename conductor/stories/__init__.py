"""The stories of requests: where the time of each went, at which workers, and by which ids it is known elsewhere."""
