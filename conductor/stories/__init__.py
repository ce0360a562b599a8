"""The stories of requests: where each spent its time, at which workers, and its ids in other systems."""
