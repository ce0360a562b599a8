"""What rdma and ucx share: connections that go past the owner's process, and their control messages."""
