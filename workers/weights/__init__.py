"""Sources of weights: GGUF files and safetensors directories behind one `WeightSource`."""

from tanghulu.workers.weights.fingerprint import fingerprint
from tanghulu.workers.weights.source import ModelSource, resolve_model
from tanghulu.workers.weights.weight_source import WeightSource

__all__ = ["ModelSource", "WeightSource", "fingerprint", "resolve_model"]
