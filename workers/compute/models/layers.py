"""Layers between a model's products: norms, and activations of MLPs."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

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
