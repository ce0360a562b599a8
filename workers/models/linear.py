"""Matrix products with weights that stay: packed once for the CPU's kernels, used every step.

Which arithmetic a CPU does fast is decided here. A CPU with bfloat16 instructions multiplies bfloat16 as it is. One
without emulates it, 5 to 30 times slower than float32 (docs/workers.md); there the weights are rounded to the asked
type and multiplied in float32, which is the more exact arithmetic too: only KV and weights carry the short type.

Packing is oneDNN's: the weights lie in the order in which the kernel reads them, instead of being reordered at every
call. Measured on AVX2 with few rows (decode), 1.4 to 3 times faster than an unpacked product.
"""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F

#: The number of rows for which oneDNN lays out a weight. Layouts for many rows were as fast for one row as those for
#: one, while a layout for one row was up to 3 times slower for 32.
_PACK_ROWS = 256


class Linear:
    """``x @ weight.T + bias`` for ``weight`` [rows, columns], computed in `compute_dtype` of its type."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        dtype = compute_dtype(weight.dtype)
        self._bias = None if bias is None else bias.to(dtype)
        self._weight = weight.to(dtype).contiguous()
        self._packed = dtype is torch.float32 and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        if self._packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(self._weight, _PACK_ROWS)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """``inputs`` [N, columns] -> [N, rows]."""
        if self._packed and len(inputs):
            product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self._weight, self._bias, "none", [], "")
            return product
        return F.linear(inputs, self._dense(), self._bias)

    def _dense(self) -> torch.Tensor:
        return self._weight.to_dense() if self._packed else self._weight


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """In what a model of ``dtype`` is computed on this CPU: itself, or float32 where that would be emulated."""
    return dtype if dtype is torch.bfloat16 and has_native_bfloat16() else torch.float32


@cache
def has_native_bfloat16() -> bool:
    """Whether the CPU has instructions that multiply bfloat16."""
    if platform.system() != "Linux":
        return False
    flags = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    return "avx512_bf16" in flags or "amx_bf16" in flags
