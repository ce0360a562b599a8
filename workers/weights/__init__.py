"""Sources of weights: GGUF files and safetensors directories behind one `WeightSource`."""

from tanghulu.workers.weights.source import ModelSource, fingerprint, resolve_model
from tanghulu.workers.weights.weight_source import WeightSource

__all__ = ["ModelSource", "WeightSource", "fingerprint", "resolve_model"]
