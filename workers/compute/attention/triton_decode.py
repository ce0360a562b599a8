"""Attention of decodes by a Triton kernel that reads the cache through block tables, for GPUs; prompts go elsewhere.

The kernel takes blocks of any length, windows, and a cache in int8 in place, and depends on no operator of torch's
version. A sequence's work follows from its own tokens, whatever the width of the table: one of 32,768 tokens beside 31
of 512 reads 48,640 tokens in all, where a gather to the width of the longest reads 1,048,576.

A program handles the query heads of one KV head over one *split* of a sequence's tokens, in tiles of ``KEYS`` tokens,
by the running softmax of FlashAttention (https://arxiv.org/abs/2205.14135); splits are joined by their log-sum-exp, as
in Flash-Decoding. Worked example: a batch of 2 with 4 KV heads on 132 multiprocessors takes 32 splits, so that 256
programs run; of 1,000 tokens in tiles of 64 each split then has one tile, and the last 16 have none.

The number of splits follows from shapes alone and nothing waits for the device, so CUDA graphs can record the kernels.
Needs triton, which torch's builds for GPUs bring along; import this module only where it is wanted. With
TRITON_INTERPRET=1 the kernels run on a CPU, slowly (``make test-kernels``).
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, replace

import numpy as np
import torch
import triton
import triton.language as tl
from triton.errors import TritonError

from tanghulu.workers.compute.attention.base import AttentionBackend, AttentionWork, StaticDecode, rows_of
from tanghulu.workers.compute.device import multiplies_bfloat16, upload
from tanghulu.workers.compute.forward_batch import DecodeTables, ForwardBatch, SequenceSpan
from tanghulu.workers.compute.kv_cache import DeviceKvCache, KvTensors, to_rows
from tanghulu.workers.engine.kv_layout import KvLayout

#: A split has at least so many tokens of the table's width: shorter ones cost more to join than they save.
_LEAST_SPLIT_TOKENS = 256
#: Bytes of a tile of K, with as many of V: two stages of both fit into the shared memory of every GPU that we support.
_TILE_BYTES = 16_384
#: Multiprocessors assumed where no GPU is asked.
_NUM_PROCESSORS = 132


@triton.jit(do_not_specialize=["splits"])
def _decode(
    query, cache, tables, contexts, out, sizes, scale, v_distance,
    query_row, block_stride, token_stride, head_stride, table_row, splits,
    BLOCK_TOKENS: tl.constexpr, WINDOW: tl.constexpr, KEYS: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, INT8: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Attend the GROUP query heads (filled up to ROWS) of a KV head over one split; also write its log-sum-exp.

    DIM is HEAD_DIM rounded up to a power of two; WINDOW 0 hides nothing; DOT is the type of products.
    """
    sequence, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context = tl.load(contexts + sequence).to(tl.int32)
    first = tl.maximum(context - WINDOW, 0) if WINDOW else 0
    each = tl.cdiv(tl.cdiv(context - first, KEYS), splits) * KEYS
    begin = first + split * each
    end = tl.minimum(begin + each, context)
    rows, dims = tl.arange(0, ROWS), tl.arange(0, DIM)
    inside = dims[None, :] < HEAD_DIM
    own = (rows[:, None] < GROUP) & inside
    heads = head * GROUP + rows
    q = tl.load(query + sequence * query_row + heads[:, None] * HEAD_DIM + dims[None, :], mask=own, other=0.0)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, DIM), tl.float32)
    for at in range(begin, end, KEYS):
        token = at + tl.arange(0, KEYS)
        seen = token < end  # nothing else is loaded: it may be NaN of a former owner
        block = tl.load(tables + sequence * table_row + token // BLOCK_TOKENS, mask=seen, other=0).to(tl.int64)
        row = cache + block * block_stride + (token % BLOCK_TOKENS) * token_stride + head * head_stride
        k = tl.load(row[:, None] + dims[None, :], mask=seen[:, None] & inside, other=0)
        v = tl.load(row[:, None] + v_distance + dims[None, :], mask=seen[:, None] & inside, other=0)
        if INT8:  # the values of a row are followed by their scale
            k_scale = tl.load((row + HEAD_DIM).to(tl.pointer_type(tl.float32), bitcast=True), mask=seen, other=0.0)
            v_scale = (row + v_distance + HEAD_DIM).to(tl.pointer_type(tl.float32), bitcast=True)
            k = (k.to(tl.float32) * k_scale[:, None]).to(q.dtype)
            v = (v.to(tl.float32) * tl.load(v_scale, mask=seen, other=0.0)[:, None]).to(q.dtype)
        scores = tl.dot(q.to(DOT), tl.trans(k.to(q.dtype).to(DOT)), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        shares, shrunk = tl.exp(scores - higher[:, None]), tl.exp(top - higher)
        total = total * shrunk + tl.sum(shares, 1)
        shares, v = shares.to(q.dtype).to(DOT), v.to(q.dtype).to(DOT)
        sums = sums * shrunk[:, None] + tl.dot(shares, v, input_precision="ieee")
        top = higher
    some = begin < end
    total = tl.where(some, total, 1.0)
    place = ((sequence * tl.num_programs(1) + head) * GROUP + rows) * splits + split
    tl.store(sizes + place, top + tl.log(total), mask=rows < GROUP)
    tl.store(out + place[:, None] * HEAD_DIM + dims[None, :], sums / total[:, None], mask=own)


@triton.jit(do_not_specialize=["splits"])
def _join(parts, sizes, out, splits, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    """Join the parts of one query head by their ``sizes``; the first part is never empty."""
    place = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, DIM)
    top = tl.load(sizes + place * splits)
    total = tl.exp(top - top)
    sums = tl.load(parts + place * splits * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0)
    for split in range(1, splits):
        at = place * splits + split
        size = tl.load(sizes + at)
        part = tl.load(parts + at * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0)
        higher = tl.maximum(top, size)
        shrunk, share = tl.exp(top - higher), tl.exp(size - higher)
        total, sums, top = total * shrunk + share, sums * shrunk + part * share, higher
    tl.store(out + place * HEAD_DIM + dims, sums / total, mask=dims < HEAD_DIM)


def attend_decodes(
    query: torch.Tensor,
    blocks: torch.Tensor,
    tables: torch.Tensor,
    contexts: torch.Tensor,
    *,
    splits: int,
    window: int | None = None,
) -> torch.Tensor:
    """Attend one query per sequence, ``query`` [B, heads, head_dim], over K and V of one layer; returns that shape.

    ``blocks`` [blocks, 2, block_tokens, kv_heads, `KvLayout.head_items`] may be a view of a cache with more layers;
    ``tables`` int64 [B, width] and ``contexts`` int64 [B], at least 1, as in `DecodeTables`; all on one device.
    """
    batch, heads, head_dim = query.shape
    _, _, block_tokens, kv_heads, _ = blocks.shape
    group, dim = heads // kv_heads, max(16, triton.next_power_of_2(head_dim))
    query = query.contiguous()
    # A single split is the result, so its program writes it in the type of the queries.
    parts = query.new_empty(batch, heads, splits, head_dim, dtype=query.dtype if splits == 1 else torch.float32)
    sizes = query.new_empty(batch, heads, splits, dtype=torch.float32)
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]  # triton launches on the current device
        _decode[(batch, kv_heads, splits)](
            query, blocks, tables, contexts, parts, sizes, head_dim**-0.5, blocks.stride(1),
            query.stride(0), blocks.stride(0), blocks.stride(2), blocks.stride(3), tables.stride(0), splits,
            BLOCK_TOKENS=block_tokens, WINDOW=window or 0, KEYS=_keys(dim * query.itemsize),
            GROUP=group, ROWS=max(16, triton.next_power_of_2(group)), HEAD_DIM=head_dim, DIM=dim,
            INT8=blocks.dtype == torch.int8, DOT=_product_type(query), num_warps=4, num_stages=2,
        )  # fmt: skip
        if splits == 1:
            return parts[:, :, 0]
        out = torch.empty_like(query)
        _join[(batch * heads,)](parts, sizes, out, splits, HEAD_DIM=head_dim, DIM=dim, num_warps=1)
    return out


def _product_type(query: torch.Tensor) -> tl.dtype:
    """Return the type of ``query``; on CPUs float32, as the interpreter takes bfloat16 for integers there."""
    return tl.float32 if query.is_cpu else getattr(tl, str(query.dtype).removeprefix("torch."))


def _keys(row_bytes: int) -> int:
    """Return the tokens of a tile: 64 of 128 values in 16 bits, fewer of wider rows, at least 16."""
    return min(64, max(16, _TILE_BYTES // row_bytes))


@dataclass(frozen=True, slots=True)
class TableDecodes:
    """One query for each row of ``tables``, as in `DecodeTables`; ``rows`` are their rows in the batch."""

    rows: torch.Tensor | slice
    decodes: DecodeTables
    splits: int
    window: int | None

    def attend(self, cache: KvTensors, layer: int, query: torch.Tensor) -> torch.Tensor:
        tables, contexts = self.decodes.tables, self.decodes.contexts
        blocks = cache.blocks[:, layer]
        return attend_decodes(query, blocks, tables, contexts, splits=self.splits, window=self.window)


class TritonAttention(AttentionBackend):
    """Backend of `attend_decodes`; prompts, and chunks of several tokens, are attended to by ``prompts``.

    ``num_processors`` of the GPU are to be kept busy by splitting few sequences more often.
    """

    def __init__(self, prompts: AttentionBackend, num_processors: int = _NUM_PROCESSORS) -> None:
        self.prompts, self._num_processors = prompts, num_processors
        self.has_masks = prompts.has_masks

    def work(
        self, cache: KvTensors, batch: ForwardBatch, num_heads: int, dtype: torch.dtype, window: int | None = None
    ) -> list[AttentionWork]:
        """Lay out tables of the decodes; those of a batch of static shape are on the device already."""
        if batch.decodes is not None:
            return [self._decodes(cache, slice(0, batch.num_tokens), batch.decodes, window)]
        decodes = [span for span in batch.spans if span.num_new == 1]
        prompts = tuple(span for span in batch.spans if span.num_new > 1)
        work: list[AttentionWork] = []
        if prompts:
            work += self.prompts.work(cache, replace(batch, spans=prompts), num_heads, dtype, window)
        if decodes:
            device = cache.rows.device
            work.append(self._decodes(cache, rows_of(decodes, device), _tables(decodes, device), window))
        return work

    def _decodes(
        self, cache: KvTensors, rows: torch.Tensor | slice, decodes: DecodeTables, window: int | None
    ) -> TableDecodes:
        num_rows, width = decodes.tables.shape
        num_tokens = min(width * cache.layout.block_tokens, window or width * cache.layout.block_tokens)
        wanted = 2 * self._num_processors // (num_rows * cache.layout.num_kv_heads)
        splits = max(1, min(wanted, num_tokens // _LEAST_SPLIT_TOKENS))
        return TableDecodes(rows, decodes, 1 << splits.bit_length() - 1, window)


def _tables(spans: list[SequenceSpan], device: torch.device) -> DecodeTables:
    """Return the tables of ``spans``, filled up with any block, in one copy to the device."""
    packed = np.zeros((len(spans), 1 + max(len(span.block_ids) for span in spans)), dtype=np.int64)
    for row, span in zip(packed, spans, strict=True):
        row[0], row[1 : 1 + len(span.block_ids)] = span.context, span.block_ids
    there = upload(packed, device)
    return DecodeTables(there[:, 1:], there[:, 0].contiguous())


#: Relative errors, beside float32, above which the kernel is not used.
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 1e-2}
_TRIAL_SPLITS = (1, 4)


def why_not(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    block_tokens: int,
    *,
    kept_as: torch.dtype | None = None,
    has_windows: bool = False,
) -> str | None:
    """Return why the kernel cannot be used for KV ``kept_as`` and computed with as ``dtype``; None if it can.

    It is tried with numbers, split and whole, beside plain attention in float32: some seconds if it is compiled anew.
    """
    if dtype not in _TOLERANCES:
        return f"Triton's kernel computes float32, bfloat16 and float16, not {dtype}"
    if device.type == "cuda" and not multiplies_bfloat16(device):
        return "Triton's kernel needs a GPU of compute capability 8.0 or more"
    contexts = (3 * block_tokens + 1, 2 * block_tokens, 1)
    cache, decodes = _trial_cache(device, head_dim, block_tokens, kept_as or dtype, contexts)
    query = torch.randn(len(contexts), 4, head_dim, generator=torch.Generator().manual_seed(5)).to(device, dtype)
    window = block_tokens + 1 if has_windows else None
    wanted = StaticDecode.of(cache, decodes, torch.float32, window).attend(cache, 1, query.float())
    try:
        answers = [
            TableDecodes(slice(0, len(query)), decodes, splits, window).attend(cache, 1, query)
            for splits in _TRIAL_SPLITS
        ]
        worst = max(float((got.float() - wanted).norm() / wanted.norm()) for got in answers)
    except (TritonError, RuntimeError, OSError, subprocess.SubprocessError) as error:
        return f"Triton's kernel does not run: {(str(error).splitlines() or [repr(error)])[-1]}"
    return None if worst < _TOLERANCES[dtype] else f"Triton's answer is off by {worst:.2g} of its size"


def _trial_cache(
    device: torch.device, head_dim: int, block_tokens: int, kept_as: torch.dtype, contexts: tuple[int, ...]
) -> tuple[DeviceKvCache, DecodeTables]:
    """Return a cache of noise, and sequences with ``contexts`` tokens of two KV heads in its blocks."""
    layout = KvLayout(2, block_tokens, 2, head_dim, str(kept_as).removeprefix("torch."))
    cache = DeviceKvCache(layout, 8, device)
    noise = torch.randn(*cache.rows.shape[:2], head_dim, generator=torch.Generator().manual_seed(7))
    cache.rows.copy_(to_rows(noise, kept_as))
    tables = upload(np.array([[3, 1, 7, 4], [5, 8, 0, 0], [2, 6, 6, 6]]), device)
    return cache, DecodeTables(tables, upload(np.array(contexts), device))
