"""RDMA by libibverbs: reliable queue pairs, one-sided READ and WRITE."""
