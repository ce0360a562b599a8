"""GPU memory: staged through pinned memory, or reached by the NIC itself."""
