"""Layers between a model's products: norms, activations of MLPs, and rotary position embeddings.

Rotary: dimension i is paired with i + head_dim/2 ("halves", as Hugging Face does). Method: RoFormer,
https://arxiv.org/abs/2104.09864; Llama 3.1's stretching: its model card and reference code.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from tanghulu.workers.compute.device import CPU
from tanghulu.workers.weights.model_config import ModelConfig, RopeScaling


class RotaryTable:
    """Cosines and sines for every position up to ``max_context``, float32, on ``device``.

    ``freq_factors`` [head_dim/2] divides the frequencies; GGUF files ship Llama 3's scaling in this form.
    """

    def __init__(
        self, config: ModelConfig, freq_factors: torch.Tensor | None = None, device: torch.device = CPU
    ) -> None:
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        frequencies = config.rope_theta**-exponents
        if freq_factors is not None:
            frequencies = frequencies / freq_factors.double()
        frequencies = _scaled(frequencies, config.rope_scaling)
        angles = torch.outer(torch.arange(config.max_context, dtype=torch.float64), frequencies)
        # The sine carries rotate_half's sign, so that applying it needs a roll and no negation.
        cos, sin = angles.cos().float(), angles.sin().float()
        self._cos = torch.cat((cos, cos), dim=1).to(device)
        self._sin = torch.cat((-sin, sin), dim=1).to(device)

    def rows(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosine and signed sine of ``positions``, each [N, 1, head_dim]."""
        cos, sin = self._cos.index_select(0, positions), self._sin.index_select(0, positions)
        return cos.to(dtype)[:, None], sin.to(dtype)[:, None]


def rotate_(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate ``states`` [N, heads, head_dim] by their positions' angles, in place."""
    swapped = states.roll(states.shape[-1] // 2, dims=-1)
    states.mul_(cos).add_(swapped.mul_(sin))  # addcmul rounds once or twice, depending on the end of a thread's share


def _scaled(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    if scaling.kind == "none":
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    assert scaling.kind == "llama3", scaling.kind
    wavelengths = 2 * math.pi / frequencies
    low = scaling.original_context / scaling.low_freq_factor
    high = scaling.original_context / scaling.high_freq_factor
    # Between the two wavelengths the factor blends linearly from unscaled (short) to divided (long).
    smooth = (scaling.original_context / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    stretched = torch.where(wavelengths > low, frequencies / scaling.factor, blended)
    return torch.where(wavelengths < high, frequencies, stretched)


Activation = Callable[[torch.Tensor], torch.Tensor]

#: Most numbers that torch always computes on one thread; its own bound is 32,768.
_PIECE = 16_384


class Norm:
    """RMSNorm: x / sqrt(mean(x^2) + eps) * (``weight`` + ``offset``), ``weight`` of the type and device of the inputs.

    On CPUs, with n columns, it is computed as sqrt(n) x / sqrt(|x|^2 + n eps), every operation rounded alike in all
    rows: four passes where torch's own takes seven, with the sqrt(n) in the weight. They are in float32 for every type,
    and the result is rounded once: with each pass rounded to bfloat16, SmolLM2's logits were off by up to 0.09 of the
    largest, and are by 0.02. On GPUs torch has one kernel for all of it. A weight plus an offset stays float32.
    """

    def __init__(self, weight: torch.Tensor, eps: float, factor: float = 1.0, offset: float = 0.0) -> None:
        """``factor``: multiplier of all results."""
        columns = len(weight)
        weight = (weight.float() + offset if offset else weight) * factor
        self._eps = eps
        self._on_cpu = weight.device.type == "cpu"
        self._weight = weight.float() * math.sqrt(columns) if self._on_cpu else weight
        self._least = columns * eps

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Norm ``hidden`` [..., columns] into a tensor of its own."""
        if not self._on_cpu:
            typed = hidden.to(self._weight.dtype)
            return F.rms_norm(typed, (len(self._weight),), self._weight, self._eps).to(hidden.dtype)
        states = hidden.float()
        size = torch.linalg.vector_norm(states, dim=-1, keepdim=True)
        normed: torch.Tensor = states / size.square_().add_(self._least).sqrt_()
        return normed.mul_(self._weight).to(hidden.dtype)


def silu_in_pieces(states: torch.Tensor) -> torch.Tensor:
    """Apply SiLU to ``states`` [N, columns] in calls too small for torch to distribute to threads; rows are alike.

    The exponential of a vector's lane and of a single number may differ in the last bit. The remainder at the end of a
    thread's share is computed number by number, and the ends of the shares depend on the number of rows.
    """
    return _in_pieces(states, torch.ops.aten.silu.out)


def gelu_tanh_in_pieces(states: torch.Tensor) -> torch.Tensor:
    """Apply GELU by its approximation with tanh, in pieces as `silu_in_pieces`."""

    def compute(piece: torch.Tensor, *, out: torch.Tensor) -> None:
        torch.ops.aten.gelu.out(piece, approximate="tanh", out=out)

    return _in_pieces(states, compute)


def _in_pieces(states: torch.Tensor, compute: Callable[..., object]) -> torch.Tensor:
    out = torch.empty(states.shape, dtype=states.dtype)
    rows = max(1, _PIECE // states.shape[1])
    for at in range(0, len(states), rows):
        for column in range(0, states.shape[1], _PIECE):
            piece = (slice(at, at + rows), slice(column, column + _PIECE))
            compute(states[piece], out=out[piece])
    return out


def _gelu_tanh(states: torch.Tensor) -> torch.Tensor:
    return F.gelu(states, approximate="tanh")


#: By `ModelConfig.activation`: the usual way, and the one that computes rows alike on CPUs for any number of them.
_ACTIVATIONS: dict[str, tuple[Activation, Activation]] = {
    "silu": (F.silu, silu_in_pieces),
    "gelu_tanh": (_gelu_tanh, gelu_tanh_in_pieces),
}


def activation(name: str, *, in_pieces: bool) -> Activation:
    """Return the activation that a config calls ``name``; its results are tensors of their own."""
    return _ACTIVATIONS[name][in_pieces]
