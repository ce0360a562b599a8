"""Which class runs which architecture, and the one call that loads a model.

To add an architecture: give ``model_config`` its name and readers, write a class with `Model`'s methods
(or switch on what it needs in ``llama``), and enter it in ``_MODELS``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from tanghulu.errors import ConfigError, ModelUnsupported
from tanghulu.workers.compute.attention.base import AttentionBackend, SdpaAttention
from tanghulu.workers.compute.device import CPU, CpuFeatures, multiplies_bfloat16, this_cpu
from tanghulu.workers.compute.forward_batch import ForwardBatch
from tanghulu.workers.compute.kv_cache import KvTensors
from tanghulu.workers.compute.linear import compute_dtype
from tanghulu.workers.compute.models.llama import LlamaModel
from tanghulu.workers.compute.models.shard import WHOLE, Shard
from tanghulu.workers.compute.process_tuning import keep_large_blocks
from tanghulu.workers.weights.model_config import ARCHITECTURES, ModelConfig
from tanghulu.workers.weights.source import ModelSource

Progress = Callable[[float], None]


class Model(Protocol):
    """A loaded model: stateless but for its weights."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device

    def forward(self, batch: ForwardBatch, cache: KvTensors) -> torch.Tensor:
        """Compute ``batch``, writing its KV to ``cache``; returns the wanted logits, float32 [L, vocab]."""


_MODELS: dict[str, type[LlamaModel]] = dict.fromkeys(ARCHITECTURES, LlamaModel)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    source: ModelSource,
    dtype: torch.dtype,
    progress: Progress | None = None,
    shard: Shard = WHOLE,
    device: torch.device = CPU,
    attention: AttentionBackend | None = None,
    *,
    cpu: CpuFeatures | None = None,
) -> Model:
    """Load ``shard`` of the weights of ``source`` onto ``device``; ``progress`` is told the fraction done, 0..1.

    Without ``attention`` it attends by SDPA, which works everywhere. On a CPU the arithmetic is what suits ``cpu``,
    without it `this_cpu`. Raises ModelUnsupported that names the architecture or the tensor that cannot be used.
    """
    factory = _MODELS.get(source.config.architecture)
    if factory is None:
        raise ModelUnsupported(
            f"architecture {source.config.architecture!r} cannot be run; known: {', '.join(_MODELS)}"
        )
    keep_large_blocks()
    cpu = cpu or this_cpu()
    attention = attention or SdpaAttention(compute_dtype(dtype, device, cpu))
    weights = source.open_weights()
    try:
        return factory(source.config, weights, attention, dtype, progress, shard, device, cpu=cpu)
    finally:
        weights.close()


def pick_dtype(name: str, device: torch.device = CPU, cpu: CpuFeatures | None = None) -> torch.dtype:
    """The dtype called ``name``; ``auto`` is bfloat16 where it is multiplied natively, else float32 (float16 on GPUs).

    On other CPUs bfloat16 halves the KV's bytes and the arithmetic is float32's in both (`linear`), so float32 is as
    fast and loses nothing. Raises ConfigError.
    """
    if name == "auto" and device.type != "cpu":
        return torch.bfloat16 if multiplies_bfloat16(device) else torch.float16
    if name == "auto":
        return torch.bfloat16 if (cpu or this_cpu()).native_bfloat16 else torch.float32
    if name not in _DTYPES:
        raise ConfigError(f"dtype {name!r} is unknown; choose auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for torch.float32: the name that flags, fingerprints and the wire use."""
    return str(dtype).removeprefix("torch.")
