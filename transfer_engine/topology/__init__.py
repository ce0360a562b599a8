"""Network devices and GPUs of this machine, their distance to memory, and which of a peer's they reach."""
