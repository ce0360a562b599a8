"""The models that the worker runs and the tensors of one step."""
