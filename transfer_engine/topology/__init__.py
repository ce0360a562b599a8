"""Network devices and GPUs of this machine, how near they are to memory, and which of a peer they reach."""
