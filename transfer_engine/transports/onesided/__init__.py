"""Common part of rdma and ucx: connections that bypass the owner's process, and their control messages."""
