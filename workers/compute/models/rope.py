"""Rotary position embeddings: the tables of cosines and sines, and the rotation of queries and keys.

Dimension i is paired with i + head_dim/2 ("halves", as Hugging Face does). Method: RoFormer,
https://arxiv.org/abs/2104.09864; Llama 3.1's stretching: its model card and reference code.
"""

from __future__ import annotations

import math

import torch

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
