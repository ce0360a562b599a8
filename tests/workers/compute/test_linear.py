"""Products as for every kind of CPU; half form is exact where it is chosen, and chosen only where it loses nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tanghulu.workers.compute import linear
from tanghulu.workers.compute.device import CPU, CpuFeatures
from tanghulu.workers.compute.linear import Linear, compute_dtype
from tests.workers.cpus import CPUS, each_cpu

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
)
def test_products_are_exact_but_for_rounding(cpu: CpuFeatures, shape, dtype, seed, has_bias):
    computed = compute_dtype(dtype, CPU, cpu)
    num, rows, columns = shape
    weight = _weight(rows, columns, seed, dtype)
    bias = _weight(1, rows, seed + 1, dtype)[0] if has_bias else None
    inputs = torch.randn(num, columns, generator=torch.Generator().manual_seed(seed + 2)).to(computed)
    kept = inputs.clone()
    got = Linear(weight, bias, cpu)(inputs)
    assert got.dtype is computed
    wanted = _exact(inputs, weight, bias)
    tolerance = TOLERANCES[computed]
    scale = _exact(inputs.abs(), weight.abs(), None if bias is None else bias.abs()) + 1e-30  # what rounding goes by
    assert float(((got.double() - wanted).abs() / scale).max()) < tolerance
    assert torch.equal(inputs, kept)
    sums = torch.randn(num, rows, generator=torch.Generator().manual_seed(seed + 3)).to(computed)
    wanted, scale = wanted + sums.double(), scale + sums.double().abs()
    Linear(weight, bias, cpu).add_to(sums, inputs)
    assert float(((sums.double() - wanted).abs() / scale).max()) < tolerance


@each_cpu
@pytest.mark.parametrize(("rows", "columns"), [(64, 32), (32, 64)])
def test_a_factor_that_was_taken_is_the_callers(cpu: CpuFeatures, rows: int, columns: int) -> None:
    weight = _weight(rows, columns, 1, torch.bfloat16)
    inputs = torch.randn(5, columns, generator=torch.Generator().manual_seed(2)).to(
        compute_dtype(weight.dtype, CPU, cpu)
    )
    linear_map = Linear(weight, cpu=cpu)
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


@HALF
@pytest.mark.parametrize(
    ("name", "computed", "product"),
    [
        ("no-libraries", torch.float32, "linear"),
        ("sse2", torch.float32, "packed"),
        ("avx2", torch.float32, "half"),
        ("avx512", torch.float32, "half"),
        ("avx512_bf16", torch.bfloat16, "linear"),
        ("amx", torch.bfloat16, "linear"),
    ],
)
def test_which_way_each_cpu_takes(
    name: str, computed: torch.dtype, product: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Published in bfloat16, asked for as that."""
    taken = ["linear"]
    for way in ("half", "packed"):
        made = getattr(linear, f"_{way}")
        monkeypatch.setattr(linear, f"_{way}", lambda weight, way=way, made=made: taken.append(way) or made(weight))
    assert compute_dtype(torch.bfloat16, CPU, CPUS[name]) is computed
    Linear(_weight(64, 32, 1, torch.bfloat16), cpu=CPUS[name])
    assert taken[-1] == product


def test_no_rows_give_no_rows():
    assert Linear(torch.randn(6, 4))(torch.empty(0, 4)).shape == (0, 6)
