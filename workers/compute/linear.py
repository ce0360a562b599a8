"""Matrix products with weights that stay: packed once for the CPU's kernels, used every step.

A GPU multiplies the weight as it is. Which arithmetic a CPU does fast is decided here, by its `CpuFeatures`. A CPU
with bfloat16 instructions multiplies bfloat16 as it is. One without emulates it, 5 to 30 times slower than float32
(docs/design/0011); there activations and sums are float32, and weights lie in memory in the shortest form that loses
nothing:

* *half*: as float16 times a power of two, widened to float32 in the kernel's registers (FBGEMM). Half the bytes to
  read is what decoding a few sequences costs. Example: a bfloat16 weight has 8 significant bits, float16 has 11, so
  only the exponent may not fit; scaled so that the largest is just below 2^15, all down to 2^-32 times the largest are
  exact, and smaller ones are off by less than 2^-40 of it, far below what float32 rounds off the sum. So every model
  that was published in bfloat16 or float16 takes this form, whether it is asked for as bfloat16 or as float32.
* *packed*: as float32 in the order in which oneDNN's kernel reads them. What has more bits, such as dequantised
  weights, takes this form.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F

from tanghulu.workers.compute.device import CPU, CpuFeatures, this_cpu

#: The number of rows for which oneDNN lays out a weight. Layouts for many rows were as fast for one row as those for
#: one, while a layout for one row was up to 3 times slower for 32.
_PACK_ROWS = 256
#: Exponent of the largest weight in half form: below float16's largest, 65504.
_TOP_EXPONENT = 15
#: A weight in half form is as good as exact if it is off by less than this part of the largest weight.
_NEGLIGIBLE = 2.0**-36


@dataclass(frozen=True, slots=True)
class _Product:
    """``multiply(x)`` times ``factor``, a power of two, is the product. ``factor`` 1: it is the product."""

    multiply: Callable[[torch.Tensor], torch.Tensor]
    factor: float = 1.0


class Linear:
    """``x @ weight.T + bias`` for ``weight`` [rows, columns], computed in `compute_dtype` of its type.

    Inputs come in that type, and products and sums have it: nothing is converted at every step.
    Where the form of the weight needs a factor, one of three brings it in: `take_factor`, `add_to`, or a pass of its
    own over inputs or products, whichever are fewer.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, cpu: CpuFeatures | None = None) -> None:
        """``cpu`` is what the arithmetic is chosen by, where ``weight`` is in main memory; without it `this_cpu`."""
        cpu = cpu or this_cpu()
        dtype = compute_dtype(weight.dtype, weight.device, cpu)
        self._bias = None if bias is None else bias.to(dtype)
        self._num_rows = len(weight)
        product = _product(weight.to(dtype).contiguous(), cpu)
        self._multiply, self._factor = product.multiply, product.factor
        self._scales_inputs = weight.shape[1] < weight.shape[0]

    def take_factor(self) -> float:
        """Return the factor by which the caller must multiply all later inputs, as a norm in front does at no cost."""
        factor, self._factor = self._factor, 1.0
        return factor

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """``inputs`` [N, columns] -> [N, rows], a tensor of its own."""
        if not len(inputs):
            return inputs.new_empty(0, self._num_rows)
        if self._factor == 1:
            product = self._multiply(inputs)
        elif self._scales_inputs:
            product = self._multiply(inputs * self._factor)
        else:
            product = self._multiply(inputs).mul_(self._factor)
        return product if self._bias is None else product.add_(self._bias)

    def add_to(self, sums: torch.Tensor, inputs: torch.Tensor) -> None:
        """Add what `__call__` gives to ``sums`` [N, rows], in place."""
        if len(inputs):
            sums.add_(self._multiply(inputs), alpha=self._factor)
            if self._bias is not None:
                sums.add_(self._bias)


def _product(weight: torch.Tensor, cpu: CpuFeatures) -> _Product:
    """The fastest way to multiply by ``weight``, which it may keep."""
    if weight.dtype is torch.float32 and weight.device.type == "cpu":
        half = _half(weight) if cpu.has_fbgemm else None
        if half is not None:
            return half
        if cpu.has_onednn:
            return _packed(weight)
    return _Product(lambda inputs: F.linear(inputs, weight))


def _half(weight: torch.Tensor) -> _Product | None:
    """The product with ``weight`` in half form; None if the weight has more bits than that."""
    largest = float(weight.abs().max())
    if largest == 0 or not math.isfinite(largest):
        return None
    scale = 2.0 ** (_TOP_EXPONENT - math.frexp(largest)[1])
    scaled = weight * scale
    if float((scaled.half().float() - scaled).abs_().max()) > _NEGLIGIBLE * largest * scale:
        return None
    packed = torch.ops.quantized.linear_prepack_fp16(scaled, None)
    multiply = _direct(torch.ops.quantized.linear_dynamic_fp16.default)
    return _Product(lambda inputs: multiply(inputs, packed), 1 / scale)  # a power of two: it rounds nothing


def _packed(weight: torch.Tensor) -> _Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
    multiply = _direct(torch.ops.mkldnn._linear_pointwise.default)
    return _Product(lambda inputs: multiply(inputs, packed, None, "none", [], ""))


def _direct(operator: torch._ops.OpOverload) -> Callable[..., torch.Tensor]:
    """``operator`` without the search of its arguments for classes that torch.compile puts in their place: 3 us."""
    return cast("Callable[..., torch.Tensor]", operator._op)


def compute_dtype(dtype: torch.dtype, device: torch.device = CPU, cpu: CpuFeatures | None = None) -> torch.dtype:
    """The type in which a model of ``dtype`` is computed: ``dtype``, or float32 where ``cpu`` would emulate it."""
    if device.type != "cpu":
        return dtype
    return dtype if dtype is torch.bfloat16 and (cpu or this_cpu()).native_bfloat16 else torch.float32
