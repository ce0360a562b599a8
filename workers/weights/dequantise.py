"""Quantised GGUF data to float32.

torch decodes the common small formats over the whole tensor (135M weights of Q4_1 in a few tenths of a second on two
cores); every other one goes through the gguf package, which is right but five times slower. Formats:
https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h (block_q4_0, block_q4_1, block_q8_0).
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import gguf
import numpy as np
import numpy.typing as npt
import torch

from tanghulu.errors import ModelUnsupported

_Bytes = npt.NDArray[np.uint8]


def num_stored_bytes(ggml_type: int, shape: tuple[int, ...], name: str) -> int:
    """Return the bytes of a tensor of ``shape`` in the file; raises ModelUnsupported if it cannot be stored so."""
    try:
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(ggml_type)]
    except (ValueError, KeyError):
        raise ModelUnsupported(f"tensor {name!r} has the unknown GGUF type {ggml_type}") from None
    if prod(shape) == 0 or shape[-1] % block:
        raise ModelUnsupported(f"tensor {name!r} has the shape {shape}; its rows must be blocks of {block} numbers")
    return prod(shape) // block * size


def dequantise(raw: _Bytes, ggml_type: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Return ``raw`` bytes as float32 of ``shape``; a copy that does not keep ``raw`` alive.

    Raises ModelUnsupported for a quantisation that neither we nor the gguf package can read.
    """
    kind = gguf.GGMLQuantizationType(ggml_type)
    fast = _FAST.get(kind)
    if fast is not None:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        # torch warns about read-only arrays; the copy is needed for alignment of the 2-byte scales anyway.
        blocks = torch.from_numpy(raw.copy()).view(-1, size)
        out = torch.empty(len(blocks), block)
        fast(blocks, out)
        return out.view(shape)
    try:
        rows = raw.reshape(*shape[:-1], -1)
        return torch.from_numpy(np.array(gguf.dequantize(rows, kind), dtype=np.float32)).view(shape)
    except NotImplementedError as error:
        raise ModelUnsupported(f"GGUF quantisation {kind.name} cannot be read: {error}") from error


def _scale(blocks: torch.Tensor, at: int) -> torch.Tensor:
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor, out: torch.Tensor) -> None:
    out[:, :16] = packed & 0x0F
    out[:, 16:] = packed >> 4


def _q4_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles(blocks[:, 2:], out)
    out.sub_(8).mul_(_scale(blocks, 0))


def _q4_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles(blocks[:, 4:], out)
    out.mul_(_scale(blocks, 0)).add_(_scale(blocks, 2))


def _q8_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(blocks[:, 2:].view(torch.int8))
    out.mul_(_scale(blocks, 0))


_FAST: dict[gguf.GGMLQuantizationType, Callable[[torch.Tensor, torch.Tensor], None]] = {
    gguf.GGMLQuantizationType.Q4_0: _q4_0,
    gguf.GGMLQuantizationType.Q4_1: _q4_1,
    gguf.GGMLQuantizationType.Q8_0: _q8_0,
}
