"""What node, master and client of the store share: their types, messages and layouts of shared memory."""
