"""Tensor parallelism: the processes of a worker that compute a share of every step."""
