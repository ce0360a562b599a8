"""Attention on GPUs by torch's FlashAttention: a step's prompts and decodes in one call per layer.

If the kernel supports block tables at this block size, it reads the cache in place. Torch's own FlashAttention 2 does
so for blocks of a multiple of 256 tokens; FlashAttention 3, if activated, for all. Otherwise a step's blocks are
gathered first, which costs prompts little (2,048 tokens behind 32,000 multiply for some milliseconds a layer and gather
for a tenth of one).

The operator is called directly: its wrapper `varlen_attn` lacks some of its arguments in torch 2.11. The kernel's
abilities are tried once, with numbers, and never assumed. Two of its modes are avoided by construction: its split of
long contexts is wrong for queries packed one behind the other (pytorch issue 194167), so it is allowed only where the
kernel lays the queries out evenly: one query a sequence, more heads than KV heads, no causal window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from tanghulu.workers.compute.attention.base import MAX_GATHERED_TOKENS, AttentionBackend, AttentionWork
from tanghulu.workers.compute.device import multiplies_bfloat16, upload
from tanghulu.workers.compute.forward_batch import DecodeTables, ForwardBatch, SequenceSpan
from tanghulu.workers.compute.kv_cache import KvTensors, from_rows

_DTYPES = (torch.bfloat16, torch.float16)
_MAX_HEAD_DIM = 256
#: Queries see themselves and everything before; the last query is at the last key.
_CAUSAL = (-1, 0)
_ALL = (-1, -1)
#: Bound of a row's error relative to its length: twice what rounding shares and results to bfloat16 takes.
_TOLERANCE = 0.01


class Kernel(NamedTuple):
    """A variant of the kernel and its calling convention: ``attend`` is `flash_attention`.

    ``reads_tables``: it takes the cache and block tables, else gathered blocks; ``key_starts``: with tables it also
    requires the keys' offsets (FlashAttention 2 does, 3 refuses them).
    """

    attend: Any
    reads_tables: bool
    key_starts: bool = True


class _Lengths(NamedTuple):
    """Of S sequences: ``starts`` of their queries int32 [S+1], ``contexts`` int32 [S], and the longest of both."""

    starts: torch.Tensor
    contexts: torch.Tensor
    max_queries: int
    max_context: int


@dataclass(frozen=True, slots=True)
class VarlenRun:
    """Rows ``rows`` of a batch: consecutive sequences, and the places of their blocks.

    ``tables`` int32 [S, width] for a kernel that reads them, else None and ``block_ids`` int64, all sequences' blocks
    to gather; sequence s has its keys from ``key_starts[s]`` on (int32 [S+1]).
    """

    kernel: Kernel
    rows: slice
    lengths: _Lengths
    key_starts: torch.Tensor
    tables: torch.Tensor | None
    block_ids: torch.Tensor

    def attend(self, cache: KvTensors, layer: int, query: torch.Tensor) -> torch.Tensor:
        key, value = cache.blocks[:, layer, 0], cache.blocks[:, layer, 1]
        if self.tables is None:
            gathered = (each.index_select(0, self.block_ids) for each in (key, value))
            key, value = (from_rows(each, query.dtype).flatten(0, 1) for each in gathered)
        return self.call(query, key, value)

    def call(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attend ``query`` [rows, heads, head_dim] to gathered keys [tokens, kv_heads, head_dim], or to all blocks."""
        lengths, one_each = self.lengths, self.lengths.max_queries == 1
        may_split = one_each and query.shape[-2] > key.shape[-2]
        attended: torch.Tensor = self.kernel.attend(
            query,
            key,
            value,
            lengths.starts,
            self.key_starts if self.tables is None or self.kernel.key_starts else None,
            lengths.max_queries,
            lengths.max_context,
            window_size=_ALL if one_each else _CAUSAL,
            seqused_k=lengths.contexts,
            block_table=self.tables,
            num_splits=None if may_split else 1,
        )
        return attended


class VarlenAttention(AttentionBackend):
    """Backend of `flash_attention`. It gathers at most `MAX_GATHERED_TOKENS` keys at a time, or one sequence's."""

    has_masks = False

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def work(
        self, cache: KvTensors, batch: ForwardBatch, num_heads: int, dtype: torch.dtype, window: int | None
    ) -> list[AttentionWork]:
        """Lay out lengths and tables; for a batch of static shape by operations on the device alone."""
        assert window is None, "models with sliding windows are refused (`backends.AttentionNeeds`)"
        if batch.decodes is not None:
            return list(self._decodes(cache, batch.decodes))
        return [self._run(cache, spans) for spans in self._grouped(cache, batch.spans)]

    def _decodes(self, cache: KvTensors, decodes: DecodeTables) -> Iterator[VarlenRun]:
        """Lay out one query per sequence, every sequence as wide as the table."""
        num_rows, width = decodes.tables.shape
        num_tokens = width * cache.layout.block_tokens
        count = num_rows if self._kernel.reads_tables else max(1, MAX_GATHERED_TOKENS // num_tokens)
        for at in range(0, num_rows, count):
            tables = decodes.tables[at : at + count]
            starts = torch.arange(len(tables) + 1, dtype=torch.int32, device=tables.device)
            lengths = _Lengths(starts, decodes.contexts[at : at + count].int(), 1, num_tokens)
            read = tables.int() if self._kernel.reads_tables else None
            rows = slice(at, at + len(tables))
            yield VarlenRun(self._kernel, rows, lengths, starts * num_tokens, read, tables.flatten())

    def _grouped(self, cache: KvTensors, spans: Sequence[SequenceSpan]) -> Iterator[list[SequenceSpan]]:
        """Return runs of spans with adjacent rows, whose keys may be gathered together."""
        group: list[SequenceSpan] = []
        num_tokens = 0
        for span in spans:
            size = 0 if self._kernel.reads_tables else len(span.block_ids) * cache.layout.block_tokens
            adjacent = not group or group[-1].first_row + group[-1].num_new == span.first_row
            if not adjacent or (group and num_tokens + size > MAX_GATHERED_TOKENS):
                yield group
                group, num_tokens = [], 0
            group.append(span)
            num_tokens += size
        yield group

    def _run(self, cache: KvTensors, spans: Sequence[SequenceSpan]) -> VarlenRun:
        queries, contexts = [span.num_new for span in spans], [span.context for span in spans]
        num_blocks = [len(span.block_ids) for span in spans]
        starts, key_starts = (np.concatenate(([0], np.cumsum(each))) for each in (queries, num_blocks))
        width = max(num_blocks)
        tables = [span.block_ids + span.block_ids[:1] * (width - len(span.block_ids)) for span in spans]
        flat = np.concatenate([starts, key_starts * cache.layout.block_tokens, contexts, np.ravel(tables)])
        sizes = [len(starts), len(key_starts), len(contexts), len(spans) * width]
        parts = torch.split(upload(flat.astype(np.int32), cache.rows.device), sizes)
        lengths = _Lengths(parts[0], parts[2], max(queries), max(contexts))
        rows = slice(spans[0].first_row, spans[-1].first_row + spans[-1].num_new)
        if self._kernel.reads_tables:
            return VarlenRun(self._kernel, rows, lengths, parts[1], parts[3].view(len(spans), width), parts[3])
        blocks = np.concatenate([span.block_ids for span in spans]).astype(np.int64)
        return VarlenRun(self._kernel, rows, lengths, parts[1], None, upload(blocks, cache.rows.device))


def why_not(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Return why this backend cannot be used; None if it can, which is tried with numbers."""
    if device.type != "cuda":
        return f"FlashAttention runs on GPUs, not on {device.type}"
    if dtype not in _DTYPES:
        return f"FlashAttention computes bfloat16 and float16, not {dtype}"
    if head_dim > _MAX_HEAD_DIM or head_dim % 8:
        return f"FlashAttention takes heads of a multiple of 8 up to {_MAX_HEAD_DIM}, not {head_dim}"
    if not multiplies_bfloat16(device):
        return "FlashAttention needs a GPU of compute capability 8.0 or more"
    return try_kernel(Kernel(flash_attention, reads_tables=False), device, dtype, head_dim, 16)


def pick_kernel(
    device: torch.device, dtype: torch.dtype, head_dim: int, block_tokens: int, *, kept_as: torch.dtype | None = None
) -> tuple[Kernel, str]:
    """Pick a kernel that reads block tables, tried with numbers; if none does, one that does not, with the reason.

    None does if KV is ``kept_as`` another type than the computing type ``dtype``.
    """
    reason, attend = "", flash_attention
    if kept_as not in (None, dtype):
        return Kernel(attend, reads_tables=False), f"KV is kept as {kept_as} and computed with as {dtype}"
    for kernel in (Kernel(attend, reads_tables=True), Kernel(attend, reads_tables=True, key_starts=False)):
        failed = try_kernel(kernel, device, dtype, head_dim, block_tokens)
        if failed is None:
            return kernel, ""
        reason = reason or failed
    return Kernel(attend, reads_tables=False), reason


def operator_arguments() -> frozenset[str]:
    """Return the names of FlashAttention's arguments in this torch."""
    return frozenset(argument.name for argument in torch.ops.aten._flash_attention_forward.default._schema.arguments)


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    key_starts: torch.Tensor | None,
    max_queries: int,
    max_context: int,
    *,
    window_size: tuple[int, int],
    seqused_k: torch.Tensor,
    block_table: torch.Tensor | None,
    num_splits: int | None,
) -> torch.Tensor:
    """Call torch's FlashAttention with the arguments of its version; they are those of `varlen_attn`.

    Raises RuntimeError for block tables if this torch's kernel takes none; one without ``num_splits`` never splits.
    """
    operator, known = torch.ops.aten._flash_attention_forward.default, operator_arguments()
    more: dict[str, Any] = {"seqused_k": seqused_k, "block_table": block_table, "num_splits": num_splits}
    if block_table is not None and "block_table" not in known:
        raise RuntimeError(f"FlashAttention of torch {torch.__version__} reads no block tables")
    attended: torch.Tensor = operator(
        query, key, value, starts, key_starts, max_queries, max_context, 0.0, False, False,
        window_size_left=window_size[0],
        window_size_right=window_size[1],
        **{name: given for name, given in more.items() if name in known or name == "seqused_k"},
    )[0]  # fmt: skip
    return attended


def try_kernel(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, head_dim: int, block_tokens: int
) -> str | None:
    """Try ``kernel`` on prompts and decodes of two sequences, two heads per KV head; return the fault, if any."""
    generator = torch.Generator(device).manual_seed(5)
    shape = (4, 2, block_tokens, 2, head_dim)
    blocks = torch.randn(shape, generator=generator, device=device).to(dtype)
    queries = torch.randn(5, 4, head_dim, generator=generator, device=device).to(dtype)
    contexts = (block_tokens + 3, 7)
    for counts in ((3, 2), (1, 1)):
        run = _trial_run(kernel, counts, contexts, block_tokens, device)
        key, value = blocks[:, 0], blocks[:, 1]
        if run.tables is None:
            key, value = (each.index_select(0, run.block_ids).flatten(0, 1) for each in (key, value))
        try:
            got = run.call(queries[: sum(counts)], key, value).float()
        except (RuntimeError, TypeError, ValueError) as error:
            return str(error).splitlines()[0]
        at = 0
        for count, context, own in zip(counts, contexts, ([2, 1], [3]), strict=True):
            seen = blocks[own].float()
            wanted = _plain(
                queries[at : at + count].float(), seen[:, 0].flatten(0, 1), seen[:, 1].flatten(0, 1), context
            )
            rows = slice(at, at + count)
            errors = (got[rows] - wanted).flatten(1).norm(dim=1) / wanted.flatten(1).norm(dim=1)
            if not bool((errors < _TOLERANCE).all()):  # NaN included
                return f"FlashAttention's answer is off by {float(errors.max()):.2%}"
            at += count
    return None


def _trial_run(
    kernel: Kernel, counts: tuple[int, int], contexts: tuple[int, int], block_tokens: int, device: torch.device
) -> VarlenRun:
    """Return two sequences, in blocks 2 and 1, and in block 3."""
    starts = torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32, device=device)
    key_starts = torch.tensor([0, 2, 3], dtype=torch.int32, device=device) * block_tokens
    tables = torch.tensor([[2, 1], [3, 0]], dtype=torch.int32, device=device) if kernel.reads_tables else None
    used = torch.tensor(contexts, dtype=torch.int32, device=device)
    lengths = _Lengths(starts, used, max(counts), max(contexts))
    return VarlenRun(kernel, slice(0, sum(counts)), lengths, key_starts, tables, torch.tensor([2, 1, 3], device=device))


def _plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, context: int) -> torch.Tensor:
    """Compute attention by its definition: the last query is at token ``context - 1``."""
    count = len(query)
    hidden = (
        torch.arange(context, device=query.device)
        > torch.arange(context - count, context, device=query.device)[:, None]
    )
    mask = torch.zeros(hidden.shape, device=query.device).masked_fill_(hidden, float("-inf"))
    keys, values = (each[:context].repeat_interleave(2, dim=1).transpose(0, 1) for each in (key, value))
    return F.scaled_dot_product_attention(query.transpose(0, 1), keys, values, attn_mask=mask).transpose(0, 1)
