"""Mapping from architectures to classes, and the one call that loads a model.

To add an architecture: enter it in ``hf_config.FAMILIES`` with its distinguishing features, write a class with
`Model`'s methods (or add switches to ``llama``), and enter it in ``_MODELS``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from tanghulu.errors import ConfigError, ModelUnsupported
from tanghulu.workers.compute.attention.base import AttentionBackend, SdpaAttention
from tanghulu.workers.compute.attention.invariant import InvariantAttention
from tanghulu.workers.compute.device import CPU, multiplies_bfloat16
from tanghulu.workers.compute.forward_batch import ForwardBatch
from tanghulu.workers.compute.kv_cache import KvTensors
from tanghulu.workers.compute.linear import Arithmetic
from tanghulu.workers.compute.models.llama import LlamaModel
from tanghulu.workers.compute.models.shard import WHOLE, Shard
from tanghulu.workers.compute.process_tuning import keep_large_blocks
from tanghulu.workers.weights.hf_config import FAMILIES
from tanghulu.workers.weights.model_config import ModelConfig
from tanghulu.workers.weights.source import ModelSource

Progress = Callable[[float], None]


class Model(Protocol):
    """A loaded model: stateless but for its weights."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    #: Whether a token's results depend bit by bit only on earlier tokens.
    batch_invariant: bool

    def forward(self, batch: ForwardBatch, cache: KvTensors) -> torch.Tensor:
        """Compute ``batch``, writing its KV to ``cache``; return the requested logits, float32 [L, vocab]."""

    def with_layers(self, num_layers: int) -> Model:
        """Return the model without the layers after the first ``num_layers``; the weights are shared."""


_MODELS: dict[str, type[LlamaModel]] = dict.fromkeys(FAMILIES, LlamaModel)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    source: ModelSource,
    dtype: torch.dtype,
    progress: Progress | None = None,
    shard: Shard = WHOLE,
    device: torch.device = CPU,
    attention: AttentionBackend | None = None,
    *,
    arithmetic: Arithmetic | None = None,
) -> Model:
    """Load ``shard`` of the weights of ``source`` onto ``device``; ``progress`` receives the fraction done, 0..1.

    Without ``attention`` it uses SDPA, which works everywhere, invariantly if ``arithmetic`` is; without ``arithmetic``
    it is computed as suits ``device``. Raises ModelUnsupported that names the unusable architecture or tensor.
    """
    factory = _MODELS.get(source.config.architecture)
    if factory is None:
        raise ModelUnsupported(
            f"architecture {source.config.architecture!r} cannot be run; known: {', '.join(_MODELS)}"
        )
    keep_large_blocks()
    invariant = arithmetic is not None and arithmetic.invariant
    attention = attention or (InvariantAttention() if invariant else SdpaAttention())
    weights = source.open_weights()
    try:
        return factory(source.config, weights, attention, dtype, progress, shard, device, arithmetic=arithmetic)
    finally:
        weights.close()


def pick_dtype(name: str, device: torch.device = CPU) -> torch.dtype:
    """Return the dtype ``name``; ``auto`` is bfloat16, but float16 on GPUs that emulate bfloat16.

    On CPUs bfloat16 is the fastest, however they multiply it (`linear`), and its KV has half the bytes of float32's;
    one choice for all of them lets workers on different CPUs share their KV. Raises ConfigError.
    """
    if name == "auto":
        return torch.bfloat16 if device.type == "cpu" or multiplies_bfloat16(device) else torch.float16
    if name not in _DTYPES:
        raise ConfigError(f"dtype {name!r} is unknown; choose auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def kv_dtype_name(name: str, dtype: torch.dtype) -> str:
    """Return the name of the KV's type for ``--kv-dtype`` ``name`` and a model of ``dtype``."""
    return dtype_name(dtype) if name == "auto" else name


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``float32`` for torch.float32: the name used by flags, fingerprints and the wire."""
    return str(dtype).removeprefix("torch.")
