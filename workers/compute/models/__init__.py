"""The models that the worker runs and the tensors that one step feeds them."""
