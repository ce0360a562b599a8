"""Attention backends against one another: ragged, in static shapes, and as torch's varlen kernel is called.

No GPU is needed: the kernel is played by what its documentation says, which also holds callers to its rules.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tanghulu.errors import ConfigError
from tanghulu.workers.compute.attention import backends
from tanghulu.workers.compute.attention import base as attention_base
from tanghulu.workers.compute.attention import varlen as attention_varlen
from tanghulu.workers.compute.attention.backends import AttentionNeeds, can, pick_attention
from tanghulu.workers.compute.attention.base import AttentionBackend, SdpaAttention
from tanghulu.workers.compute.attention.varlen import (
    Kernel,
    VarlenAttention,
    flash_attention,
    operator_arguments,
    pick_kernel,
    try_kernel,
    why_not,
)
from tanghulu.workers.compute.device import CPU
from tanghulu.workers.compute.forward_batch import (
    DecodeShape,
    ForwardBatch,
    SequenceChunk,
    build_forward_batch,
    decode_batch,
    is_decode,
    pack_decodes,
)
from tanghulu.workers.compute.kv_cache import DeviceKvCache, from_rows, to_rows
from tanghulu.workers.engine.kv_layout import KvLayout
from tests.workers.compute.varlen_kernel import varlen_attn

BLOCK, LAYERS, NUM_BLOCKS, HEAD_DIM = 4, 2, 40, 8


def flash_2_of_multiples_of_256(query: torch.Tensor, key: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
    if more["block_table"] is not None and key.shape[1] % 256:
        raise RuntimeError("Paged KV cache block size must be divisible by 256\nmore")
    assert rest[2] is not None, "it takes the keys' offsets whatever it does with them"
    return varlen_attn(query, key, *rest, **more)


def flash_3(query: torch.Tensor, key: torch.Tensor, value: Any, cu_q: Any, cu_k: Any, *rest: Any, **more: Any) -> Any:
    if more["block_table"] is not None and cu_k is not None:
        raise RuntimeError("offsets of keys and a page table")
    return varlen_attn(query, key, value, cu_q, cu_k, *rest, **more)


class Case:
    """Sequences over shuffled blocks of a cache full of noise, and the step's queries, keys and values."""

    def __init__(
        self, runs: Sequence[tuple[int, int]], groups: int, kv_heads: int, seed: int, kept: str = "float32"
    ) -> None:
        self.heads = groups * kv_heads
        layout = KvLayout(LAYERS, BLOCK, kv_heads, HEAD_DIM, kept)
        noise = torch.Generator().manual_seed(seed)
        self.cache = DeviceKvCache(layout, NUM_BLOCKS, CPU)
        before = torch.randn(*self.cache.rows.shape[:2], HEAD_DIM, generator=noise)
        self.cache.rows.copy_(to_rows(before, self.cache.rows.dtype))
        free = random.Random(seed).sample(range(NUM_BLOCKS), NUM_BLOCKS)
        self.chunks = []
        for start, count in runs:
            blocks = [free.pop() for _ in range(-(-(start + count) // BLOCK))]
            self.chunks.append(SequenceChunk([1] * count, start, blocks, True))
        total = sum(count for _, count in runs)
        self.query = torch.randn(total, self.heads, HEAD_DIM, generator=noise)
        self.key, self.value = torch.randn(2, total, kv_heads, HEAD_DIM, generator=noise)

    def attend(
        self, backend: AttentionBackend, batch: ForwardBatch | None = None, window: int | None = None
    ) -> torch.Tensor:
        """The second layer's result, from the same cache each time."""
        batch = batch or build_forward_batch(self.chunks, BLOCK)
        before = self.cache.rows.clone()
        rows = batch.num_tokens
        plan = backend.plan(self.cache, batch, self.heads, self.query.dtype, window)
        states = [F.pad(each, (0, 0, 0, 0, 0, rows - len(each))) for each in (self.query, self.key, self.value)]
        result = plan.attend(1, states[0], torch.cat(states[1:], dim=1))
        self.written = self.cache.rows.clone()
        self.cache.rows.copy_(before)
        return result


RUNS = st.lists(st.tuples(st.integers(0, 14), st.integers(1, 9)), min_size=1, max_size=6)
DECODES = st.lists(st.tuples(st.integers(0, 22), st.just(1)), min_size=1, max_size=6)
#: Whether a kernel reads block tables, which it does of a cache in the type that is computed in, and the cache's type.
KERNELS = [(True, "float32"), (False, "float32"), (False, "bfloat16"), (False, "int8")]
SHAPES = {"groups": st.integers(1, 3), "kv_heads": st.integers(1, 2), "seed": st.integers(0, 99)}


@settings(deadline=None, max_examples=60)
@given(runs=RUNS, kernel=st.sampled_from(KERNELS), bound=st.sampled_from([8, 40, 1000]), **SHAPES)
def test_varlen_attends_as_sdpa_does(runs, kernel, bound, groups, kv_heads, seed):
    reads_tables, kept = kernel
    case = Case(runs, groups, kv_heads, seed, kept)
    wanted, written = case.attend(SdpaAttention()), case.written
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_varlen, "MAX_GATHERED_TOKENS", bound)
        got = case.attend(VarlenAttention(Kernel(varlen_attn, reads_tables)))
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    assert torch.equal(case.written, written)


@settings(deadline=None, max_examples=60)
@given(
    runs=DECODES, backend=st.sampled_from([None, *KERNELS]), kept=st.sampled_from(["float32", "int8"]),
    bound=st.sampled_from([8, 1000]), **SHAPES,
)  # fmt: skip
def test_static_shapes_attend_as_ragged_ones_do(runs, backend, kept, bound, groups, kv_heads, seed):
    """And the rows that fill up write to the scratch block alone."""
    reads_tables, kept = backend or (False, kept)
    case = Case(runs, groups, kv_heads, seed, kept)
    wanted, written = case.attend(SdpaAttention()), case.written
    assert is_decode(case.chunks)
    shape = DecodeShape.of(case.chunks, BLOCK)
    packed = torch.from_numpy(pack_decodes(case.chunks, shape, BLOCK, case.cache.scratch))
    under_test = SdpaAttention() if backend is None else VarlenAttention(Kernel(varlen_attn, reads_tables))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_varlen, "MAX_GATHERED_TOKENS", bound)
        patch.setattr(attention_base, "MAX_GATHERED_TOKENS", bound)
        got = case.attend(under_test, decode_batch(packed, BLOCK))
    torch.testing.assert_close(got[: len(runs)], wanted, atol=1e-5, rtol=1e-5)
    assert torch.isfinite(got).all()
    scratch = case.cache.scratch * case.cache.row_stride
    assert torch.equal(case.written[:scratch], written[:scratch])


@pytest.mark.parametrize("runs", [RUNS, DECODES], ids=["runs", "decodes"])
def test_a_narrow_cache_is_read_as_what_it_holds(runs):
    """Queries see of a cache in 8 bits what they see of a wide one into which the same was written back."""

    @settings(deadline=None, max_examples=30)
    @given(runs=runs, **SHAPES)
    def attends(runs, groups, kv_heads, seed):
        narrow, wide = (Case(runs, groups, kv_heads, seed, kept) for kept in ("int8", "float32"))
        wide.cache.rows.copy_(from_rows(narrow.cache.rows, torch.float32))
        wide.key, wide.value = (from_rows(to_rows(each, torch.int8), torch.float32) for each in (wide.key, wide.value))
        assert torch.equal(narrow.attend(SdpaAttention()), wide.attend(SdpaAttention()))
        assert torch.equal(from_rows(narrow.written, torch.float32), wide.written)

    attends()


@pytest.mark.parametrize("kept", ["float32", "int8"])
@pytest.mark.parametrize("static", [False, True])
def test_what_blocks_held_before_reaches_nobody(static: bool, kept: str):
    """A request whose activations overflowed leaves NaN in its blocks, and masks hide no NaN."""
    case = Case([(2, 1), (9, 1), (4, 1)], 2, 2, 1, kept)
    batch = None
    if static:
        packed = pack_decodes(case.chunks, DecodeShape.of(case.chunks, BLOCK), BLOCK, case.cache.scratch)
        batch = decode_batch(torch.from_numpy(packed), BLOCK)
    wanted = case.attend(SdpaAttention(), batch)
    own = torch.zeros(case.cache.blocks.shape[:4], dtype=torch.bool)  # block, layer, K or V, token
    for chunk in case.chunks:
        for at in range(chunk.start):
            own[chunk.block_ids[at // BLOCK], :, :, at % BLOCK] = True
    case.cache.blocks.view(torch.uint8)[~own] = 0xFF  # NaN, and in int8 as its scale
    assert torch.equal(case.attend(SdpaAttention(), batch)[:3], wanted[:3])


def test_the_packed_example():
    chunks = [
        SequenceChunk([11], 6, [7, 2], True),
        SequenceChunk([12], 2, [9, 3], True),
        SequenceChunk([13], 8, [4, 5, 6], True),
    ]
    shape = DecodeShape.of(chunks, BLOCK)
    assert shape == (4, 4)
    packed = pack_decodes(chunks, shape, BLOCK, 50)
    assert packed.tolist() == [
        [11, 6, 7, 2, 50, 50], [12, 2, 9, 50, 50, 50], [13, 8, 4, 5, 6, 50], [0, 0, 50, 50, 50, 50]
    ]  # fmt: skip
    batch = decode_batch(torch.from_numpy(packed), BLOCK)
    assert batch.blocks.tolist() == [2, 9, 6, 50]
    assert batch.offsets.tolist() == [2, 2, 0, 0]
    assert batch.decodes is not None
    assert batch.decodes.contexts.tolist() == [7, 3, 9, 1]
    assert DecodeShape.of(chunks[:1], 1) == (1, 8)
    assert not is_decode([*chunks, SequenceChunk([1, 2], 0, [1], True)])
    assert not is_decode([SequenceChunk([1], 0, [1], False)])


class TestTrial:
    """A kernel is tried with numbers before it is used."""

    @pytest.mark.parametrize("reads_tables", [False, True])
    def test_a_kernel_that_is_right(self, reads_tables):
        assert try_kernel(Kernel(varlen_attn, reads_tables), CPU, torch.bfloat16, 16, 16) is None

    def test_a_kernel_that_is_wrong_is_found(self):
        def wrong(*args: Any, **more: Any) -> torch.Tensor:
            return varlen_attn(*args, **more | {"window_size": (-1, -1), "num_splits": 1})

        assert "off by" in str(try_kernel(Kernel(wrong, False), CPU, torch.bfloat16, 16, 16))

    @pytest.mark.parametrize("head_dim", [16, 64, 128])
    def test_a_right_kernel_may_round_to_the_neighbouring_number(self, head_dim: int):
        """Which is .016 away from numbers above 2, but never 1 % of a row."""

        def rounded(*args: Any, **more: Any) -> torch.Tensor:
            right = varlen_attn(*args, **more)
            return (right.view(torch.int16) + 1).view(torch.bfloat16)

        assert try_kernel(Kernel(rounded, False), CPU, torch.bfloat16, head_dim, 16) is None

    @pytest.mark.parametrize("error", [float("nan"), 0.015])
    def test_a_kernel_that_is_wrong_in_one_row_is_found(self, error: float):
        """By an error that is small beside the largest number, too."""

        def wrong(*args: Any, **more: Any) -> torch.Tensor:
            out = varlen_attn(*args, **more)
            out[0] += error
            return out

        assert "off by" in str(try_kernel(Kernel(wrong, False), CPU, torch.bfloat16, 16, 256))

    @pytest.mark.parametrize(
        ("kernel", "block_tokens", "reads_tables", "key_starts"),
        [
            (flash_2_of_multiples_of_256, 256, True, True),
            (flash_2_of_multiples_of_256, 64, False, True),
            (flash_3, 64, True, False),
        ],
    )
    def test_what_it_can_do_is_what_it_is_used_for(self, monkeypatch, kernel, block_tokens, reads_tables, key_starts):
        monkeypatch.setattr(attention_varlen, "flash_attention", kernel)
        picked, reason = pick_kernel(CPU, torch.bfloat16, 16, block_tokens)
        assert (picked.reads_tables, picked.key_starts) == (reads_tables, key_starts)
        assert reason == ("" if reads_tables else "Paged KV cache block size must be divisible by 256")


#: Schemas of torch's operator behind its nine positional arguments.
SCHEMAS = {
    "2.6 to 2.11": "Tensor? seqused_k=None, Tensor? alibi_slopes=None",
    "2.12 on": "Tensor? seqused_k=None, Tensor? alibi_slopes=None, Tensor? block_table=None, int? num_splits=None",
}
POSITIONAL = (
    "Tensor query, Tensor key, Tensor value, Tensor? cum_seq_q, Tensor? cum_seq_k, SymInt max_q, SymInt max_k, "
    "float dropout_p, bool is_causal, bool return_debug_mask"
)
WINDOWS = "*, float? scale=None, SymInt? window_size_left=None, SymInt? window_size_right=None"


class Operator:
    """The operator of a torch: it takes what its schema names, computed by the stand-in."""

    def __init__(self, more: str) -> None:
        self._schema = torch._C.parse_schema(f"aten::flash({POSITIONAL}, {WINDOWS}, {more}) -> Tensor")

    def __call__(self, query: Any, key: Any, value: Any, *rest: Any, **more: Any) -> tuple[torch.Tensor]:
        assert more.keys() <= {argument.name for argument in self._schema.arguments}
        cu_q, cu_k, max_q, max_k, *flags = rest
        assert flags == [0.0, False, False]
        window = (more.pop("window_size_left"), more.pop("window_size_right"))
        splits = {"num_splits": 1, "block_table": None} | more
        return (varlen_attn(query, key, value, cu_q, cu_k, max_q, max_k, window_size=window, **splits),)


@pytest.mark.parametrize("torchs", SCHEMAS)
def test_each_torch_gets_the_arguments_that_it_has(monkeypatch, torchs):
    monkeypatch.setattr(torch.ops.aten._flash_attention_forward, "default", Operator(SCHEMAS[torchs]))
    assert try_kernel(Kernel(flash_attention, False), CPU, torch.bfloat16, 16, 16) is None
    picked, reason = pick_kernel(CPU, torch.bfloat16, 16, 256)
    assert picked.reads_tables == (torchs == "2.12 on")
    assert ("reads no block tables" in reason) != picked.reads_tables


def test_the_schema_of_this_torch_is_known():
    assert operator_arguments() >= {"window_size_left", "window_size_right", "seqused_k"}


def test_a_kernel_without_an_argument_is_not_used():
    def older(*args: Any) -> torch.Tensor:
        raise AssertionError

    assert "unexpected keyword argument" in str(try_kernel(Kernel(older, False), CPU, torch.bfloat16, 16, 16))


class TestRegistry:
    NEEDS = AttentionNeeds(CPU, torch.float32, 64, 64)

    @pytest.mark.parametrize("kept_as", [torch.int8, torch.float32])
    def test_no_kernel_reads_tables_of_kv_of_another_type(self, monkeypatch, kept_as):
        monkeypatch.setattr(attention_varlen, "flash_attention", varlen_attn)
        assert pick_kernel(CPU, torch.bfloat16, 16, 256, kept_as=torch.bfloat16)[0].reads_tables
        picked, reason = pick_kernel(CPU, torch.bfloat16, 16, 256, kept_as=kept_as)
        assert not picked.reads_tables
        assert reason == f"KV is kept as {kept_as} and computed with as torch.bfloat16"

    def test_a_cpu_attends_by_sdpa(self):
        assert isinstance(pick_attention("auto", self.NEEDS), SdpaAttention)
        assert can("varlen", self.NEEDS) == "FlashAttention runs on GPUs, not on cpu"
        assert can("triton", self.NEEDS) == "Triton's kernel runs on GPUs, not on cpu"
        assert can("sdpa", self.NEEDS) is None

    def test_a_gpu_without_triton_has_the_others(self, monkeypatch):
        monkeypatch.setattr(backends, "find_spec", lambda name: None)
        needs = self.NEEDS._replace(device=torch.device("cuda", 0))
        assert can("triton", needs) == "triton is not installed; torch's builds for GPUs bring it along"
        assert isinstance(pick_attention("auto", needs), SdpaAttention)

    def test_what_cannot_be_is_refused_with_the_reason(self):
        with pytest.raises(ConfigError, match="--attention varlen: FlashAttention runs on GPUs"):
            pick_attention("varlen", self.NEEDS)
        with pytest.raises(ConfigError, match="choose auto, triton, varlen, sdpa"):
            pick_attention("magic", self.NEEDS)

    @pytest.mark.parametrize(
        ("dtype", "head_dim", "text"),
        [(torch.float32, 64, "computes bfloat16 and float16"), (torch.bfloat16, 320, "up to 256, not 320")],
    )
    def test_types_and_heads_without_a_kernel(self, dtype, head_dim, text):
        assert text in str(why_not(torch.device("cuda", 0), dtype, head_dim))
