"""The Triton kernels in Triton's interpreter, on a CPU, beside the other backends: ``make test-kernels``."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("extra: triton and TRITON_INTERPRET=1, as make test-kernels has them", allow_module_level=True)

from tanghulu.workers.compute.attention import triton_decode
from tanghulu.workers.compute.attention.base import SdpaAttention
from tanghulu.workers.compute.attention.triton_decode import TritonAttention, attend_decodes, why_not
from tanghulu.workers.compute.attention.varlen import Kernel, VarlenAttention
from tanghulu.workers.compute.device import CPU
from tanghulu.workers.compute.forward_batch import DecodeShape, ForwardBatch, decode_batch, pack_decodes
from tests.workers.compute.test_attention import BLOCK, DECODES, RUNS, SHAPES, Case
from tests.workers.compute.varlen_kernel import varlen_attn

KEPT = st.sampled_from(["float32", "bfloat16", "int8"])
WINDOWS = st.sampled_from([None, 1, 7, 100])
FEW = settings(deadline=None, max_examples=10)


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts of some tokens are split, and need several tiles."""
    monkeypatch.setattr(triton_decode, "_LEAST_SPLIT_TOKENS", 4)
    monkeypatch.setattr(triton_decode, "_TILE_BYTES", 16)


def static(case: Case) -> ForwardBatch:
    packed = pack_decodes(case.chunks, DecodeShape.of(case.chunks, BLOCK), BLOCK, case.cache.scratch)
    return decode_batch(torch.from_numpy(packed), BLOCK)


@FEW
@given(runs=DECODES, kept=KEPT, window=WINDOWS, processors=st.sampled_from([1, 12, 200]), **SHAPES)
def test_static_shapes(runs, kept, window, processors, groups, kv_heads, seed):
    case = Case(runs, groups, kv_heads, seed, kept)
    wanted, written = case.attend(SdpaAttention(), static(case), window), case.written
    got = case.attend(TritonAttention(SdpaAttention(), processors), static(case), window)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    assert torch.equal(case.written, written)


@FEW
@given(runs=RUNS, kept=KEPT, window=WINDOWS, processors=st.sampled_from([1, 12]), **SHAPES)
def test_decodes_beside_prompts(runs, kept, window, processors, groups, kv_heads, seed):
    """Prompts go to the other backend, decodes in any places of the batch to the kernel."""
    runs = [run for pair in zip(runs, [(seed % 20, 1)] * len(runs), strict=True) for run in pair][:6]
    case = Case(runs, groups, kv_heads, seed, kept)
    wanted, written = case.attend(SdpaAttention(), None, window), case.written
    others = [SdpaAttention()] if window else [SdpaAttention(), VarlenAttention(Kernel(varlen_attn, False))]
    for prompts in others:
        got = case.attend(TritonAttention(prompts, processors), None, window)
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
        assert torch.equal(case.written, written)


@pytest.mark.parametrize("kept", ["bfloat16", "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types(kept: str, dtype: torch.dtype):
    case = Case([(18, 1), (3, 1), (0, 1)], 3, 2, 1, kept)
    wanted = case.attend(SdpaAttention(), static(case))
    case.query, case.key, case.value = (each.to(dtype) for each in (case.query, case.key, case.value))
    for processors in (1, 200):
        got = case.attend(TritonAttention(SdpaAttention(), processors), static(case))
        assert got.dtype == dtype
        assert float((got.float() - wanted).norm() / wanted.norm()) < 1e-2


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("kept", ["float32", "int8"])
def test_former_bytes_of_blocks_reach_nobody_but_own_overflow_is_seen(kept: str):
    case = Case([(2, 1), (9, 1), (4, 1)], 2, 2, 1, kept)
    backend = TritonAttention(SdpaAttention(), 200)
    wanted = case.attend(backend, static(case))
    own = torch.zeros(case.cache.blocks.shape[:4], dtype=torch.bool)  # block, layer, K or V, token
    for chunk in case.chunks:
        for at in range(chunk.start):
            own[chunk.block_ids[at // BLOCK], :, :, at % BLOCK] = True
    case.cache.blocks.view(torch.uint8)[~own] = 0xFF  # NaN, and in int8 as its scale
    assert torch.equal(case.attend(backend, static(case))[:3], wanted[:3])
    case.cache.blocks.view(torch.uint8)[case.chunks[1].block_ids[0]] = 0xFF
    got = case.attend(backend, static(case))
    assert got[1].isnan().all()
    assert torch.equal(got[::2][:1], wanted[::2][:1])


@pytest.mark.parametrize("groups", [17, 40])
def test_many_query_heads_of_one_kv_head(groups: int):
    case = Case([(18, 1), (3, 1)], groups, 1, 1)
    wanted = case.attend(SdpaAttention(), static(case))
    torch.testing.assert_close(case.attend(TritonAttention(SdpaAttention(), 9), static(case)), wanted)


class TestTrial:
    @pytest.mark.parametrize("windows", [False, True])
    @pytest.mark.parametrize("kept", [torch.bfloat16, torch.int8])
    @pytest.mark.parametrize("head_dim", [40, 64])
    def test_the_kernel_is_right(self, head_dim: int, kept: torch.dtype, windows: bool):
        for dtype in (torch.float32, torch.bfloat16):
            assert why_not(CPU, dtype, head_dim, 12, kept_as=kept, has_windows=windows) is None

    def test_a_wrong_kernel_is_found(self, monkeypatch: pytest.MonkeyPatch):
        def without_last(query, blocks, tables, contexts, **more):
            return attend_decodes(query, blocks, tables, (contexts - 1).clamp(min=1), **more)

        monkeypatch.setattr(triton_decode, "attend_decodes", without_last)
        assert "answer is off by" in str(why_not(CPU, torch.bfloat16, 64, 16))

    def test_a_kernel_that_does_not_compile_is_not_used(self, monkeypatch: pytest.MonkeyPatch):
        def compiled(*args, **more):
            raise RuntimeError("long text\nFailed to find C compiler")

        monkeypatch.setattr(triton_decode, "attend_decodes", compiled)
        assert why_not(CPU, torch.bfloat16, 64, 16) == "Triton's kernel does not run: Failed to find C compiler"

    def test_other_types(self):
        assert "not torch.float64" in str(why_not(CPU, torch.float64, 64, 16))


def test_the_kernels_compile_for_a_gpu(tmp_path: Path):
    """To machine code, which needs none; in a process that does not interpret."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.workers.compute.compile_triton"],
        env=kept | {"TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert all(int(line) <= 99 << 10 for line in done.stdout.split()), "as much as the smallest GPU has"


def test_work_of_a_split_follows_from_shapes_alone():
    """So that graphs can record it: contexts are read by the device only."""
    case = Case([(18, 1), (3, 1)], 2, 1, 1)
    batch, backend = static(case), TritonAttention(SdpaAttention(), 132)
    assert batch.decodes is not None
    (work,) = backend.work(case.cache, batch, 2, torch.float32)
    hidden = replace(batch, decodes=replace(batch.decodes, contexts=batch.decodes.contexts.to("meta")))
    (same,) = backend.work(case.cache, hidden, 2, torch.float32)
    assert work.splits == same.splits == 8
