"""Matrix products with constant weights: packed once for the CPU's kernels, used every step.

The type of a weight (`--dtype`) is one thing, the kernel that multiplies by it another. A GPU multiplies the weight as
it is; for a CPU `Arithmetic` picks by its instructions and the number of rows (figures: docs/design/0011). Activations
have the type that the kernel takes, so they follow from the kernel. A weight has one or two of these forms:

* *half*, for activations in float32: as float16 times a power of two, widened in the kernel's registers (FBGEMM).
  Decoding a few sequences costs the reading of the weights, hence half as much. Example: a bfloat16 weight has 8
  significant bits, float16 has 11, so only the exponent may not fit; scaled so that the largest is just below 2^15, all
  down to 2^-32 times the largest are exact, and smaller ones are off by less than 2^-40 of it, far below float32's
  rounding of the sum. So every model published in bfloat16 or float16 takes this form, whether requested as that or as
  float32.
* *packed*, for activations in float32: as float32 in the order in which oneDNN's kernel reads them. Weights with more
  bits, such as dequantised ones requested as float32, take this form.
* *packed bfloat16*, for activations in bfloat16, in oneDNN's order too: only where the CPU multiplies bfloat16 in
  hardware, twice as fast as half form for many rows there and half as fast for one. A weight in both has 4 bytes. Other
  CPUs emulate bfloat16, 5 to 30 times slower than float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.nn.functional as F

from tanghulu.workers.compute.device import CPU, CpuFeatures, this_cpu

#: Number of rows for which oneDNN lays out a weight. Layouts for many rows were as fast for one row as those for one,
#: while a layout for one row was up to 3 times slower for 32.
_PACK_ROWS = 256
#: Most rows that half form multiplies faster than packed bfloat16.
MOST_FEW_ROWS = 6
#: Exponent of the largest weight in half form: below float16's largest, 65504.
_TOP_EXPONENT = 15
#: A weight in half form counts as exact if its error is below this part of the largest weight.
_NEGLIGIBLE = 2.0**-36

#: Rows of each call of a kernel whose results would otherwise depend on the number of rows, for batch invariance. On
#: CPUs decoding one sequence pays for all of them, and prompts for the weights being read more often; on GPUs both are
#: cheap.
INVARIANT_ROWS = 16
INVARIANT_ROWS_ON_GPU = 128
#: Half form then gets multiples of as many rows as FBGEMM's kernel for AVX2 takes at once: what is left of other
#: numbers goes to kernels of which those for one and two rows sum in other orders.
_HALF_ROWS = 6

_Multiply = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Types in which a model is computed: ``few`` for at most `MOST_FEW_ROWS` rows, else ``many``.

    Each weight has a form for each type, one if both are the same. ``invariant``: a row's results have the same bits
    whatever the other rows and their number, so one kernel serves all numbers of rows.
    """

    cpu: CpuFeatures
    few: torch.dtype
    many: torch.dtype
    invariant: bool = False

    @classmethod
    def of(
        cls,
        dtype: torch.dtype,
        device: torch.device = CPU,
        cpu: CpuFeatures | None = None,
        *,
        invariant: bool = False,
    ) -> Arithmetic:
        """Return the fastest for a model of ``dtype`` on ``device``; for a CPU, one like ``cpu``, else `this_cpu`."""
        cpu = cpu or this_cpu()
        if device.type != "cpu":
            return cls(cpu, dtype, dtype, invariant)
        if invariant:
            return cls(cpu, torch.float32, torch.float32, invariant)
        if dtype is not torch.bfloat16 or not (cpu.native_bfloat16 and cpu.has_onednn):
            return cls(cpu, torch.float32, torch.float32)
        return cls(cpu, torch.float32 if cpu.has_fbgemm else torch.bfloat16, torch.bfloat16)

    def in_one_form(self) -> Arithmetic:
        """Return the fastest with only one form per weight: half the memory where it would have two."""
        return replace(self, few=self.many)

    def of_rows(self, num_rows: int) -> torch.dtype:
        """Return the type of ``num_rows`` rows of activations."""
        return self.few if num_rows <= MOST_FEW_ROWS else self.many

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Types that `of_rows` gives."""
        return (self.many,) if self.few is self.many else (self.few, self.many)

    @property
    def item_bytes(self) -> int:
        """Most bytes of an element of a weight, all its forms together: two forms are of two bytes each."""
        return self.many.itemsize * len(self.dtypes)


@dataclass(frozen=True, slots=True)
class _Product:
    """``multiply(x)`` times ``factor``, a power of two, is the product. ``factor`` 1: it is the product."""

    multiply: _Multiply
    factor: float = 1.0


class Linear:
    """``x @ weight.T + bias`` for ``weight`` [rows, columns] and inputs of a type that its `Arithmetic` has.

    Products and sums have the type of the inputs. If the form of the weight needs a factor, it is applied in one of
    three ways: `take_factor`, `add_to`, or a separate pass over inputs or products, whichever are fewer.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, arithmetic: Arithmetic | None = None
    ) -> None:
        """Without ``arithmetic``, use the one that suits the type of ``weight`` on its device."""
        arithmetic = arithmetic or Arithmetic.of(weight.dtype, weight.device)
        self._biases = None if bias is None else {dtype: bias.to(dtype) for dtype in arithmetic.dtypes}
        self._num_rows = len(weight)
        self._multiply, self._factor = _products(weight.contiguous(), arithmetic)
        self._scales_inputs = weight.shape[1] < weight.shape[0]

    def take_factor(self) -> float:
        """Return the factor by which the caller must multiply all later inputs, as a preceding norm does at no cost."""
        factor, self._factor = self._factor, 1.0
        return factor

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Multiply ``inputs`` [N, columns] -> [N, rows], a tensor of its own."""
        if not len(inputs):
            return inputs.new_empty(0, self._num_rows)
        multiply = self._multiply[inputs.dtype]
        if self._factor == 1:
            product = multiply(inputs)
        elif self._scales_inputs:
            product = multiply(inputs * self._factor)
        else:
            product = multiply(inputs).mul_(self._factor)
        return product if self._biases is None else product.add_(self._biases[inputs.dtype])

    def add_to(self, sums: torch.Tensor, inputs: torch.Tensor) -> None:
        """Add the result of `__call__` to ``sums`` [N, rows], in place."""
        if len(inputs):
            sums.add_(self._multiply[inputs.dtype](inputs), alpha=self._factor)
            if self._biases is not None:
                sums.add_(self._biases[inputs.dtype])


def _products(weight: torch.Tensor, arithmetic: Arithmetic) -> tuple[dict[torch.dtype, _Multiply], float]:
    """Return a product by ``weight`` for each type of inputs, and their common factor."""
    few, many = arithmetic.few, arithmetic.many
    product = _product(weight.to(few), arithmetic)
    products = {few: product.multiply}
    if many is not few:  # with the same factor, a power of two: no rounding
        products[many] = _product(weight.to(many) / product.factor, arithmetic).multiply
    return products, product.factor


def _product(weight: torch.Tensor, arithmetic: Arithmetic) -> _Product:
    """Return the fastest product by ``weight``, which it may keep, for inputs of its type."""
    cpu, on_cpu = arithmetic.cpu, weight.device.type == "cpu"
    if on_cpu:
        half = _half(weight) if weight.dtype is torch.float32 and cpu.has_fbgemm else None
        if half is not None:
            return replace(half, multiply=_filled(half.multiply, _HALF_ROWS)) if arithmetic.invariant else half
    product = _packed(weight) if on_cpu and cpu.has_onednn else _Product(lambda inputs: F.linear(inputs, weight))
    if not arithmetic.invariant:
        return product
    return replace(product, multiply=_in_tiles(product.multiply, INVARIANT_ROWS if on_cpu else INVARIANT_ROWS_ON_GPU))


def _filled(multiply: _Multiply, num_rows: int) -> _Multiply:
    """Return ``multiply`` with rows of zeros behind the inputs, up to a multiple of ``num_rows``."""
    return lambda inputs: multiply(F.pad(inputs, (0, 0, 0, -len(inputs) % num_rows)))[: len(inputs)]


def _in_tiles(multiply: _Multiply, num_rows: int) -> _Multiply:
    """Return ``multiply`` in calls of ``num_rows`` rows, the last one filled: the kernel is always the same."""
    return _filled(lambda rows: torch.cat([multiply(tile) for tile in torch.split(rows, num_rows)]), num_rows)


def _half(weight: torch.Tensor) -> _Product | None:
    """Return the product with ``weight`` in half form; None if the weight has more bits than that."""
    largest = float(weight.abs().max())
    if largest == 0 or not math.isfinite(largest):
        return None
    scale = 2.0 ** (_TOP_EXPONENT - math.frexp(largest)[1])
    scaled = weight * scale
    if float((scaled.half().float() - scaled).abs_().max()) > _NEGLIGIBLE * largest * scale:
        return None
    packed = torch.ops.quantized.linear_prepack_fp16(scaled, None)
    multiply = _direct(torch.ops.quantized.linear_dynamic_fp16.default)
    return _Product(lambda inputs: multiply(inputs, packed), 1 / scale)  # a power of two: no rounding


def _packed(weight: torch.Tensor) -> _Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
    multiply = _direct(torch.ops.mkldnn._linear_pointwise.default)
    return _Product(lambda inputs: multiply(inputs, packed, None, "none", [], ""))


def _direct(operator: torch._ops.OpOverload) -> Callable[..., torch.Tensor]:
    """Return ``operator`` without the 3 us search of its arguments for classes that torch.compile substitutes."""
    return cast("Callable[..., torch.Tensor]", operator._op)
