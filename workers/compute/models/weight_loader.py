"""Takes a model's weights from a checkpoint, checked against its config, as the products of one rank's share."""

from __future__ import annotations

import re

import torch

from tanghulu.errors import ModelUnsupported
from tanghulu.workers.compute.linear import Arithmetic, Linear
from tanghulu.workers.compute.models.layers import Norm
from tanghulu.workers.compute.models.shard import Shard
from tanghulu.workers.weights.gguf_file import FREQUENCY_FACTORS
from tanghulu.workers.weights.model_config import ModelConfig
from tanghulu.workers.weights.safetensors_dir import WeightSource

#: Buffers in older files, which every implementation computes itself.
_IGNORED = re.compile(r"(^|\.)(rotary_emb\.inv_freq|attn_rot_embd\.weight)$")
_MAX_NAMED = 5
_WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class WeightLoader:
    """Takes tensors by name, checked against the shape given by the config."""

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        dtype: torch.dtype,
        shard: Shard,
        device: torch.device,
        arithmetic: Arithmetic,
    ) -> None:
        self._config, self._weights, self._dtype, self.shard = config, weights, dtype, shard
        self.device, self.arithmetic = device, arithmetic

    @property
    def on_cpu(self) -> bool:
        """Whether the weights go to main memory."""
        return self.device.type == "cpu"

    def has(self, name: str) -> bool:
        """Return whether the checkpoint has the tensor."""
        return self._weights.has(name)

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the tensor ``name`` in its final type and on its device; raises ModelUnsupported."""
        tensor = self._weights.tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelUnsupported(f"tensor {name!r} has shape {tuple(tensor.shape)}; the config says {shape}")
        if tensor.dtype not in _WEIGHT_DTYPES:  # its scales are elsewhere
            raise ModelUnsupported(
                f"tensor {name!r} is {tensor.dtype}: this worker does not support quantised safetensors"
            )
        if self.device.type != "cpu":  # over the bus in the file's type, converted there
            return tensor.to(self.device).to(self._dtype)
        # clone: a tensor that is a view of a mapped file must not outlive the file.
        return tensor.to(self._dtype, copy=True)

    def norm(self, name: str, size: int, factor: float = 1.0) -> Norm:
        """Return the norm ``name``, with results multiplied by ``factor``."""
        return Norm(self.take(name, (size,)), self._config.rms_eps, factor, self._config.norm_offset)

    def linear(self, prefix: str, parts: tuple[tuple[str, int], ...], columns: int, *, bias: bool = False) -> Linear:
        """Return the product with this rank's rows of all ``parts`` (name, rows) of ``prefix``, stacked."""
        own = self.shard.own
        weight = [self.take(f"{prefix}.{name}.weight", (rows, columns))[own(rows)] for name, rows in parts]
        biases = [self.take(f"{prefix}.{name}.bias", (rows,))[own(rows)] for name, rows in parts] if bias else []
        return Linear(torch.cat(weight), torch.cat(biases) if biases else None, self.arithmetic)

    def summand(self, name: str, rows: int, columns: int, *, bias: bool = False) -> Linear:
        """Return the product with this rank's columns; the ranks' results add up to the whole, bias counted once."""
        weight = self.take(f"{name}.weight", (rows, columns))[:, self.shard.own(columns)]
        whole = self.take(f"{name}.bias", (rows,)) if bias else None
        return Linear(weight, whole if self.shard.rank == 0 else None, self.arithmetic)

    def frequency_factors(self) -> torch.Tensor | None:
        """Return GGUF's divisors of the rotary frequencies, as in the file, if there are any."""
        if not self._weights.has(FREQUENCY_FACTORS):
            return None
        factors, shape = self._weights.tensor(FREQUENCY_FACTORS), (self._config.head_dim // 2,)
        if tuple(factors.shape) != shape or not bool((factors > 0).all()):
            raise ModelUnsupported(f"rope_freqs.weight {tuple(factors.shape)} must be {shape} numbers above 0")
        return factors

    def require_all_taken(self) -> None:
        """Raise ModelUnsupported for tensors of the checkpoint that are not part of the model."""
        left = sorted(name for name in self._weights.untaken() if _IGNORED.search(name) is None)
        if left:
            raise ModelUnsupported(
                f"the checkpoint has {len(left)} tensors that this worker does not use: "
                f"{', '.join(left[:_MAX_NAMED])}{', ...' if len(left) > _MAX_NAMED else ''}"
            )
