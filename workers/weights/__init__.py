"""Sources of weights: GGUF files and safetensors directories behind one `WeightSource`."""

from tanghulu.workers.weights.source import ModelSource, fingerprint, resolve_model

__all__ = ["ModelSource", "fingerprint", "resolve_model"]
