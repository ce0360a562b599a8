"""The arithmetic of a step: forward pass, attention, sampling, on CPU or GPU."""
