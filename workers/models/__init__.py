"""The models that the worker runs and the tensors that one step feeds them."""

from tanghulu.workers.models.registry import Model, load_model

__all__ = ["Model", "load_model"]
