"""Products by packed weights: exact in half form where that is chosen, and chosen only where it loses nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tanghulu.workers.compute import linear
from tanghulu.workers.compute.linear import Linear

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


@settings(max_examples=60, deadline=None)
@given(
    shape=st.sampled_from([(1, 8, 8), (1, 33, 70), (5, 96, 40), (8, 40, 96), (130, 24, 64)]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    seed=st.integers(0, 1000),
    has_bias=st.booleans(),
)
def test_products_are_those_of_float32(shape, dtype, seed, has_bias):
    if dtype is torch.bfloat16 and linear.has_native_bfloat16():
        return
    num, rows, columns = shape
    weight = _weight(rows, columns, seed, dtype)
    bias = _weight(1, rows, seed + 1, dtype)[0] if has_bias else None
    inputs = torch.randn(num, columns, generator=torch.Generator().manual_seed(seed + 2))
    kept = inputs.clone()
    got = Linear(weight, bias)(inputs)
    wanted = _exact(inputs, weight, bias)
    scale = _exact(inputs.abs(), weight.abs(), None if bias is None else bias.abs()) + 1e-30  # what rounding goes by
    assert float(((got.double() - wanted).abs() / scale).max()) < 2e-6
    assert torch.equal(inputs, kept)
    sums = torch.randn(num, rows, generator=torch.Generator().manual_seed(seed + 3))
    wanted, scale = wanted + sums.double(), scale + sums.double().abs()
    Linear(weight, bias).add_to(sums, inputs)
    assert float(((sums.double() - wanted).abs() / scale).max()) < 2e-6


@pytest.mark.parametrize(("rows", "columns"), [(64, 32), (32, 64)])
def test_a_factor_that_was_taken_is_the_callers(rows: int, columns: int) -> None:
    weight = _weight(rows, columns, 1, torch.bfloat16)
    inputs = torch.randn(5, columns, generator=torch.Generator().manual_seed(2))
    linear_map = Linear(weight)
    expected = linear_map(inputs)
    factor = linear_map.take_factor()
    assert torch.equal(linear_map(inputs * factor), expected)
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


def test_no_rows_give_no_rows():
    assert Linear(torch.randn(6, 4))(torch.empty(0, 4)).shape == (0, 6)
