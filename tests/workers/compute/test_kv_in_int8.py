"""K and V in 8 bits: what comes back, whatever was kept."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tanghulu.errors import ConfigError
from tanghulu.workers.compute.kv_cache import LEAST_MAGNITUDE, from_rows, gathered_item_bytes, to_rows
from tanghulu.workers.config import WorkerConfig
from tanghulu.workers.engine.kv_layout import KvLayout
from tanghulu.workers.weights import resolve_model
from tests.workers.tiny import write_tiny

HEAD_DIM, MOST, TINY = 8, 2.0**127, 2.0**-95
VALUES = st.floats(-MOST, MOST, width=32) | st.floats(-4, 4, width=32) | st.floats(-TINY, TINY, width=32)
ROWS = st.lists(st.lists(VALUES, min_size=HEAD_DIM, max_size=HEAD_DIM), min_size=1, max_size=5)


@settings(deadline=None, max_examples=200)
@given(ROWS)
def test_a_value_comes_back_within_half_a_scale(rows: list[list[float]]) -> None:
    values = torch.tensor(rows)
    kept = to_rows(values, torch.int8)
    got = from_rows(kept, torch.float32)
    scale = values.abs().amax(dim=-1, keepdim=True).clamp(min=LEAST_MAGNITUDE) / 127
    assert kept.shape == (len(rows), HEAD_DIM + 4)
    assert bool(((got - values).abs() <= scale * 0.501).all())
    alone = torch.cat([to_rows(values[at : at + 1], torch.int8) for at in range(len(rows))])
    assert torch.equal(kept, alone), "a row hangs on nothing beside it"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_overflowed_is_not_hidden(bad: float, dtype: torch.dtype) -> None:
    values = torch.ones(2, HEAD_DIM)
    values[0, 3] = bad
    got = from_rows(to_rows(values, torch.int8), dtype)
    assert got[0].isnan().all()
    assert torch.equal(got[1], torch.ones(HEAD_DIM, dtype=dtype))


def test_the_worked_example() -> None:
    kept = to_rows(torch.tensor([0.5, -2.54, 0, 1.273]), torch.int8)
    assert kept[:4].tolist() == [25, -127, 0, 64]
    assert from_rows(kept, torch.float32).tolist() == pytest.approx([0.5, -2.54, 0, 1.28])
    assert not from_rows(torch.zeros(HEAD_DIM + 4, dtype=torch.int8), torch.bfloat16).any(), "a wiped block is zeros"


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16, torch.int8])
def test_rows_are_read_in_the_type_that_is_computed(kept: torch.dtype) -> None:
    values = torch.tensor([[1.0, -0.5, 0.25, 0, 1, 1, 1, -1]], dtype=torch.bfloat16)
    for dtype in (torch.float32, torch.bfloat16):
        got = from_rows(to_rows(values, kept), dtype)
        assert got.dtype == dtype
        torch.testing.assert_close(got.float(), values.float(), atol=0.005, rtol=0.01)


def test_sizes() -> None:
    layout = KvLayout(num_layers=30, block_tokens=64, num_kv_heads=3, head_dim=64, dtype="int8")
    assert layout.block_bytes == 64 * 30 * 2 * 3 * (64 + 4)
    assert layout.part_shape == (30, 2, 64, 3, 68)
    sizes = [gathered_item_bytes(kept, torch.bfloat16) for kept in (torch.bfloat16, torch.float32, torch.int8)]
    assert sizes == [2, 6, 7]
    assert gathered_item_bytes(torch.int8, torch.float32) == 5


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    odd = resolve_model(str(write_tiny(tmp_path, head_dim=6).path)).config
    with pytest.raises(ConfigError, match="--kv-dtype int8 needs a head size that is a multiple of 4, not 6"):
        KvLayout.of(odd, 8, "int8")
    with pytest.raises(ConfigError, match="--kv-dtype works with --engine torch"):
        WorkerConfig(engine="mock", kv_dtype="int8")
