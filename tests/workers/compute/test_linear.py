"""Products as for every kind of CPU; half form is exact where it is chosen, and chosen only where it loses nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tanghulu.workers.compute import linear
from tanghulu.workers.compute.device import CPU, CpuFeatures
from tanghulu.workers.compute.linear import Arithmetic, Linear
from tests.workers.cpus import CPUS, PACKS_BFLOAT16, each_cpu, on_cpu

HALF = pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines, reason="this torch has no FBGEMM, which half form needs"
)


def _weight(rows: int, columns: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp(torch.randn(rows, columns, generator=generator) * 3)  # many octaves
    return (torch.randn(rows, columns, generator=generator) * spread * 0.01).to(dtype)


def _exact(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product = inputs.double() @ weight.double().T
    return product if bias is None else product + bias.double()


#: What rounding may make of a sum, relative to the sum of the magnitudes. bfloat16 keeps 8 bits, of products, of sums
#: with a bias and of sums with what was there: each is off by 2^-8 of itself at most.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 3 * 2.0**-8}


@each_cpu
@settings(max_examples=60, deadline=None)
@given(
    shape=st.sampled_from([(1, 8, 8), (1, 33, 70), (5, 96, 40), (8, 40, 96), (130, 24, 64)]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    seed=st.integers(0, 1000),
    has_bias=st.booleans(),
    one_form=st.booleans(),
)
def test_products_are_exact_but_for_rounding(cpu: CpuFeatures, shape, dtype, seed, has_bias, one_form):
    """In every type that the arithmetic has, whatever the number of rows for which it would take it."""
    arithmetic = Arithmetic.of(dtype, CPU, cpu)
    arithmetic = arithmetic.in_one_form() if one_form else arithmetic
    num, rows, columns = shape
    weight = _weight(rows, columns, seed, dtype)
    bias = _weight(1, rows, seed + 1, dtype)[0] if has_bias else None
    for computed in arithmetic.dtypes:
        inputs = torch.randn(num, columns, generator=torch.Generator().manual_seed(seed + 2)).to(computed)
        kept = inputs.clone()
        got = Linear(weight, bias, arithmetic)(inputs)
        assert got.dtype is computed
        wanted = _exact(inputs, weight, bias)
        tolerance = TOLERANCES[computed]
        scale = _exact(inputs.abs(), weight.abs(), None if bias is None else bias.abs()) + 1e-30  # rounding goes by it
        assert float(((got.double() - wanted).abs() / scale).max()) < tolerance
        assert torch.equal(inputs, kept)
        sums = torch.randn(num, rows, generator=torch.Generator().manual_seed(seed + 3)).to(computed)
        wanted, scale = wanted + sums.double(), scale + sums.double().abs()
        Linear(weight, bias, arithmetic).add_to(sums, inputs)
        assert float(((sums.double() - wanted).abs() / scale).max()) < tolerance


@each_cpu
@pytest.mark.parametrize(("rows", "columns"), [(64, 32), (32, 64)])
def test_a_factor_that_was_taken_is_the_callers(cpu: CpuFeatures, rows: int, columns: int) -> None:
    weight, arithmetic = _weight(rows, columns, 1, torch.bfloat16), Arithmetic.of(torch.bfloat16, CPU, cpu)
    inputs = [
        torch.randn(5, columns, generator=torch.Generator().manual_seed(2)).to(dtype) for dtype in arithmetic.dtypes
    ]
    linear_map = Linear(weight, arithmetic=arithmetic)
    expected = [linear_map(each) for each in inputs]
    factor = linear_map.take_factor()
    assert all(torch.equal(linear_map(each * factor), wanted) for each, wanted in zip(inputs, expected, strict=True))
    assert linear_map.take_factor() == 1


@HALF
def test_short_weights_take_half_form_even_if_float32_is_asked_for():
    for dtype in (torch.bfloat16, torch.float16):
        assert linear._half(_weight(64, 32, 1, dtype).float()) is not None


@HALF
def test_half_form_is_refused_where_it_would_round():
    weight = _weight(64, 32, 1, torch.bfloat16).float()
    weight[3, 4] = 0.1  # no float16, however scaled
    assert linear._half(weight) is None
    assert linear._half(torch.zeros(4, 4)) is None
    weight[3, 4] = float("inf")
    assert linear._half(weight) is None


@HALF
def test_huge_and_tiny_weights_are_exact():
    """A power of two before and after: nothing overflows float16's 65504, and 2^-30 of the largest is not lost."""
    for largest in (2.0**90, 1.0, 2.0**-90):
        weight = torch.tensor([[1.9921875, 1.0], [2.0**-30, 1.5 * 2.0**-24]]) * largest
        product = linear._half(weight)
        assert product is not None
        assert torch.equal(product.multiply(torch.eye(2)).T * product.factor, weight)


FEW_AND_MANY = (1, 6, 7, 512)
WAYS = {
    "no-libraries": ("linear",) * 4,
    "sse2": ("packed",) * 4,
    "avx2": ("half",) * 4,
    "avx512": ("half",) * 4,
    "avx512_bf16": ("half", "half", "packed bfloat16", "packed bfloat16"),
    "amx": ("half", "half", "packed bfloat16", "packed bfloat16"),
}


@HALF
@pytest.mark.parametrize("name", [on_cpu(name, name) for name in WAYS])
def test_which_way_each_cpu_takes_for_each_number_of_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Published in bfloat16, asked for as that."""
    taken: list[str] = []

    def told(way: str) -> Callable[[torch.Tensor], linear._Product | None]:
        make = getattr(linear, f"_{way}")

        def made(weight: torch.Tensor) -> linear._Product | None:
            product = make(weight)
            kind = f"{way} bfloat16" if weight.dtype is torch.bfloat16 else way
            return product and replace(product, multiply=lambda x: (taken.append(kind), product.multiply(x))[1])

        return made

    for way in ("half", "packed"):
        monkeypatch.setattr(linear, f"_{way}", told(way))
    arithmetic = Arithmetic.of(torch.bfloat16, CPU, CPUS[name])
    product = Linear(_weight(64, 32, 1, torch.bfloat16), arithmetic=arithmetic)
    for num_rows, way in zip(FEW_AND_MANY, WAYS[name], strict=True):
        taken[:] = ["linear"]
        product(torch.randn(num_rows, 32).to(arithmetic.of_rows(num_rows)))
        assert taken[-1] == way, num_rows


def test_two_forms_are_as_large_as_float32_and_one_is_half_of_it() -> None:
    cpu = CpuFeatures(native_bfloat16=True, has_fbgemm=True, has_onednn=True)
    two = Arithmetic.of(torch.bfloat16, CPU, cpu)
    assert (two.dtypes, two.item_bytes) == ((torch.float32, torch.bfloat16), 4)
    assert (two.in_one_form().dtypes, two.in_one_form().item_bytes) == ((torch.bfloat16,), 2)
    without = Arithmetic.of(torch.bfloat16, CPU, replace(cpu, has_fbgemm=False))
    assert without == without.in_one_form(), "without half form packed bfloat16 is the fastest for all"


@PACKS_BFLOAT16
def test_a_weight_that_is_not_finite_has_both_forms() -> None:
    weight = _weight(8, 8, 1, torch.bfloat16)
    weight[3, 4] = float("inf")
    arithmetic = Arithmetic.of(torch.bfloat16, CPU, CPUS["avx512_bf16"])
    for dtype in arithmetic.dtypes:
        got = Linear(weight, arithmetic=arithmetic)(torch.ones(1, 8, dtype=dtype))
        assert torch.isinf(got[0]).tolist() == [row == 3 for row in range(8)]


def test_no_rows_give_no_rows():
    assert Linear(torch.randn(6, 4))(torch.empty(0, 4)).shape == (0, 6)
