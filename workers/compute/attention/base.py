"""Attention over the paged cache: one interface, and the backend by torch's SDPA, available on every device.

A backend's `plan` does the layer-independent work once a step (which blocks to gather, which masks); the plan's
`attend` is then called for every layer. SDPA reads no block tables, so this backend gathers a sequence's blocks into
one contiguous K and V.

Two kinds of work share a step. A *prefill run* has its queries attend to the sequence's earlier tokens and,
causally, to each other: query i of a run that starts at token s sees tokens 0..s+i. *Decodes* have one query
each that sees everything, so several of them form one padded kernel call; they are grouped so that no
sequence is padded to more than twice its blocks.

Grouped-query attention folds the G query heads that share a KV head into the query dimension: [G x tokens]
queries against one K, instead of repeating K G times.

A prefill run is cut into pieces of `_PIECE_TOKENS` queries, each with the keys up to its own last one: the kernel also
computes masked products, and its own causal mode handles too few rows to be fast. Example: 512 queries after 512 tokens
are four pieces with 640, 768, 896 and 1,024 keys, 19 % fewer products than 1,024 for all; 512 after none 38 %.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from tanghulu.workers.compute.device import upload
from tanghulu.workers.compute.forward_batch import DecodeTables, ForwardBatch, SequenceSpan
from tanghulu.workers.compute.kv_cache import KvTensors, from_rows, to_rows

#: Tokens gathered at a time: bounds the copy for any batch. With 8 KV heads of 128 in bfloat16: K and V 1 GiB.
MAX_GATHERED_TOKENS = 262_144


def hidden_tokens(contexts: torch.Tensor, num_tokens: int, window: int | None = None) -> torch.Tensor:
    """Return bool [B, num_tokens]: tokens behind the first ``contexts[b]`` of row b, or before the last ``window``.

    The query of row b is the last of these tokens.
    """
    at, ends = torch.arange(num_tokens, device=contexts.device), contexts[:, None]
    return at >= ends if window is None else (at >= ends) | (at < ends - window)


def tokens_mask(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return [B, 1, 1, num_tokens], -inf where ``hidden`` [B, num_tokens], else 0.

    It does not hide NaN, which a block may hold from its last owner: ``hidden`` K and V are also zeroed.
    """
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(hidden, float("-inf"))[:, None, None, :]


@dataclass(frozen=True, slots=True)
class StaticDecode:
    """One query for each row of ``tables`` [B, width]; ``hidden`` and ``mask`` as in `tokens_mask`.

    For any device, and for CUDA graphs: every sequence is gathered to the width of the table and masked behind its own
    tokens; no shape and no decision depends on the sequences' lengths, so the same operations serve every step of one
    shape. A kernel that reads block tables saves the gathered copy.
    """

    tables: torch.Tensor
    hidden: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def of(cls, cache: KvTensors, decodes: DecodeTables, dtype: torch.dtype, window: int | None = None) -> StaticDecode:
        """Prepare a step's decodes for queries of ``dtype``, by operations on the device alone."""
        num_tokens = decodes.tables.shape[1] * cache.layout.block_tokens
        hidden = hidden_tokens(decodes.contexts, num_tokens, window)
        return cls(decodes.tables, hidden, tokens_mask(hidden, dtype))

    @property
    def rows(self) -> slice:
        return slice(0, len(self.tables))

    def attend(self, cache: KvTensors, layer: int, query: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(query)
        for part in self._parts():
            folded = query[part].view(len(query[part]), cache.layout.num_kv_heads, -1, cache.layout.head_dim)
            key, value = (self._gathered(cache, layer, kv, part, query.dtype) for kv in (0, 1))
            result = F.scaled_dot_product_attention(folded, key, value, attn_mask=self.mask[part])
            out[part] = result.reshape(-1, *query.shape[1:])
        return out

    def _parts(self) -> Iterator[slice]:
        """Return runs of rows of at most `MAX_GATHERED_TOKENS` tokens, or of one row."""
        count = max(1, MAX_GATHERED_TOKENS // self.mask.shape[-1])
        return (slice(at, at + count) for at in range(0, len(self.tables), count))

    def _gathered(self, cache: KvTensors, layer: int, kv: int, part: slice, dtype: torch.dtype) -> torch.Tensor:
        """Return K or V as [rows, kv_heads, tokens, head_dim]."""
        tables, layout = self.tables[part], cache.layout
        blocks = from_rows(cache.blocks[:, layer, kv].index_select(0, tables.flatten()), dtype)
        tokens = blocks.view(len(tables), -1, layout.num_kv_heads, layout.head_dim)
        return tokens.masked_fill_(self.hidden[part, :, None, None], 0).transpose(1, 2)


#: Queries of a prefill run that share a kernel call.
_PIECE_TOKENS = 128


class AttentionBackend(ABC):
    """An attention implementation: a device and a family of kernels. Makes a plan for each forward batch.

    ``has_masks``: prompts are attended to with masks, for which memory is to be planned.
    """

    has_masks = True

    def plan(
        self, cache: KvTensors, batch: ForwardBatch, num_heads: int, dtype: torch.dtype, window: int | None = None
    ) -> PagedPlan:
        """Prepare ``batch``, whose queries will be of ``dtype``; the plan is valid for this one step.

        With a ``window`` a query sees only that many positions, the last ones, including its own.
        """
        return PagedPlan(cache, batch, self.work(cache, batch, num_heads, dtype, window))

    @abstractmethod
    def work(
        self, cache: KvTensors, batch: ForwardBatch, num_heads: int, dtype: torch.dtype, window: int | None
    ) -> list[AttentionWork]:
        """Divide the batch's ``spans`` or ``decodes`` into pieces of work; the spans may leave rows out."""


class SdpaAttention(AttentionBackend):
    """Backend of torch's scaled_dot_product_attention: for CPUs, and for GPUs without a better one."""

    def work(
        self, cache: KvTensors, batch: ForwardBatch, num_heads: int, dtype: torch.dtype, window: int | None
    ) -> list[AttentionWork]:
        """Group the decodes, build the masks."""
        if batch.decodes is not None:
            return [StaticDecode.of(cache, batch.decodes, dtype, window)]
        spans = [_seen(span, window, cache.layout.block_tokens) for span in batch.spans]
        decodes = [span for span in spans if span.num_new == 1]
        prefills = [span for span in spans if span.num_new > 1]
        work: list[AttentionWork] = [_PrefillRun.of(cache, span, num_heads, dtype, window) for span in prefills]
        work += [_DecodeGroup.of(cache, group, dtype, window) for group in _similar_lengths(decodes)]
        return work


def _seen(span: SequenceSpan, window: int | None, block_tokens: int) -> SequenceSpan:
    """Return ``span`` without the leading blocks seen by none of its queries.

    Example: 3 queries behind 40 tokens, a window of 16, blocks of 8. The first query, at position 40, sees positions 25
    and after: three blocks are left out, and it is at position 16 of the rest.
    """
    if window is None:
        return span
    skipped = max(0, span.context - span.num_new - window + 1) // block_tokens
    return replace(span, context=span.context - skipped * block_tokens, block_ids=span.block_ids[skipped:])


class AttentionWork(Protocol):
    """Some ``rows`` of a batch and what they attend to."""

    @property
    def rows(self) -> torch.Tensor | slice:
        """Index of the rows, or a slice if they are adjacent."""

    def attend(self, cache: KvTensors, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Attend the rows' ``query`` [rows, heads, head_dim]; returns a tensor of that shape."""


class PagedPlan:
    """Attention over one forward batch: writes the step's K and V to their blocks, then does each piece of ``work``."""

    def __init__(self, cache: KvTensors, batch: ForwardBatch, work: Sequence[AttentionWork]) -> None:
        self._cache, self._work, self._turn = cache, work, batch.turn
        places = torch.arange(2 * cache.layout.num_layers, device=batch.blocks.device) * cache.layout.block_tokens
        rows = batch.blocks * cache.row_stride + batch.offsets + cache.row_of(0, 0)
        # For each layer, the places of the first token's K and V, the second's K and V, and so on.
        self._rows = (places.view(-1, 1, 2) + rows[:, None]).flatten(1).unbind()

    def attend(self, layer: int, query: torch.Tensor, key_value: torch.Tensor) -> torch.Tensor:
        """Write the step's K and V to the cache, then attend.

        ``query`` [N, heads, head_dim] and ``key_value`` [N, 2 x kv_heads, head_dim], for each token the heads of K and
        then those of V; queries and keys are rotated. Returns [N, heads x head_dim].
        """
        cached = self._cache.rows
        cached.index_copy_(0, self._rows[layer], to_rows(key_value, cached.dtype).reshape(-1, *cached.shape[1:]))
        if self._turn is not None:
            self._turn.written(layer)
        if len(self._work) == 1:
            return self._work[0].attend(self._cache, layer, query).flatten(1)
        out = torch.empty_like(query)
        for work in self._work:
            out[work.rows] = work.attend(self._cache, layer, query[work.rows])
        return out.flatten(1)


class Gather:
    """Copies K and V of ``count`` sequences into contiguous tensors. ``block_ids`` has equally many blocks of each.

    The cache is seen as a row of *planes*, the K or the V of a layer of a block; the places of a layer's planes are
    computed once a step for all layers, so that a layer costs one copy.
    """

    def __init__(self, cache: KvTensors, block_ids: npt.NDArray[np.int64], count: int) -> None:
        layout, device = cache.layout, cache.rows.device
        tokens = layout.block_tokens
        self._planes = cache.rows.view(-1, tokens, *cache.rows.shape[1:])
        self._shape = (2, count, -1, layout.num_kv_heads, layout.head_dim)
        blocks = upload(block_ids, device) * (cache.row_stride // tokens) + cache.row_of(0, 0) // tokens
        at = torch.arange(2 * layout.num_layers, device=device).view(layout.num_layers, 2, 1)
        self._ids = (at + blocks).flatten(1).unbind()

    def of(
        self, layer: int, dtype: torch.dtype, num_tokens: int, hidden: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first ``num_tokens`` of K and V as ``dtype``, each [count, kv_heads, num_tokens, head_dim].

        The ``hidden`` ones of all tokens are zeroed, those of K of all sequences and then those of V.
        """
        gathered = from_rows(self._planes.index_select(0, self._ids[layer]), dtype)
        if hidden is not None:
            gathered.flatten(0, 1).index_fill_(0, hidden, 0)
        key, value = gathered.view(self._shape).narrow(2, 0, num_tokens).transpose(2, 3).unbind()
        return key, value


@dataclass(frozen=True, slots=True)
class _Piece:
    """Queries ``start .. end`` of a run, which see the sequence's tokens ``first .. context`` as ``mask`` allows."""

    start: int
    end: int
    first: int
    context: int
    mask: torch.Tensor

    @classmethod
    def of(cls, bounds: tuple[int, int], before: int, groups: int, window: int | None, like: torch.Tensor) -> _Piece:
        """Return that of a run with ``before`` earlier tokens; ``mask`` [groups x queries, tokens] as ``like``."""
        start, end = bounds
        context = before + end
        first = 0 if window is None else max(0, before + start - window + 1)
        at = torch.arange(first, context, device=like.device)
        queries = at[before + start - first :, None]
        hidden = at > queries
        if window is not None:
            hidden |= at <= queries - window
        mask = like.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
        return cls(start, end, first, context, mask.repeat(groups, 1))


@dataclass(frozen=True, slots=True)
class _PrefillRun:
    """One sequence's run of several tokens, attended to in pieces, so that few causally hidden products are made."""

    span: SequenceSpan
    gather: Gather
    pieces: tuple[_Piece, ...]

    @classmethod
    def of(
        cls, cache: KvTensors, span: SequenceSpan, num_heads: int, dtype: torch.dtype, window: int | None
    ) -> _PrefillRun:
        like, groups = torch.empty(0, dtype=dtype, device=cache.rows.device), num_heads // cache.layout.num_kv_heads
        before = span.context - span.num_new
        bounds = [(at, min(at + _PIECE_TOKENS, span.num_new)) for at in range(0, span.num_new, _PIECE_TOKENS)]
        pieces = tuple(_Piece.of(each, before, groups, window, like) for each in bounds)
        return cls(span, Gather(cache, np.asarray(span.block_ids), 1), pieces)

    @property
    def rows(self) -> slice:
        return slice(self.span.first_row, self.span.first_row + self.span.num_new)

    def attend(self, cache: KvTensors, layer: int, query: torch.Tensor) -> torch.Tensor:
        layout, out = cache.layout, torch.empty_like(query)
        key, value = self.gather.of(layer, query.dtype, self.span.context)
        groups = query.shape[1] // layout.num_kv_heads
        for piece in self.pieces:
            rows, count = slice(piece.start, piece.end), piece.end - piece.start
            folded = query[rows].view(count, layout.num_kv_heads, groups, layout.head_dim).permute(1, 2, 0, 3)
            folded = folded.reshape(1, layout.num_kv_heads, groups * count, layout.head_dim)
            tokens = slice(piece.first, piece.context)
            seen = (key[:, :, tokens], value[:, :, tokens])
            result = F.scaled_dot_product_attention(folded, *seen, attn_mask=piece.mask)
            unfolded = result.view(layout.num_kv_heads, groups, count, layout.head_dim).permute(2, 0, 1, 3)
            out[rows].view(unfolded.shape).copy_(unfolded)
        return out


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Sequences with one query each, padded to the longest. ``mask`` [B, 1, 1, tokens]; None if all is seen.

    ``num_tokens`` is the longest context: the rest of its last block is gathered, but not computed with. ``hidden`` are
    the places, among all gathered tokens, of those behind a shorter context, of K and then of V.
    """

    rows: torch.Tensor | slice
    gather: Gather
    num_tokens: int
    hidden: torch.Tensor | None
    mask: torch.Tensor | None

    @classmethod
    def of(
        cls, cache: KvTensors, spans: Sequence[SequenceSpan], dtype: torch.dtype, window: int | None
    ) -> _DecodeGroup:
        device = cache.rows.device
        count, rows, contexts = len(spans), rows_of(spans, device), [span.context for span in spans]
        width, longest = max(len(span.block_ids) for span in spans), max(contexts)
        # Padding repeats the sequence's own first block: any readable block does, as the mask hides it.
        table = [span.block_ids + span.block_ids[:1] * (width - len(span.block_ids)) for span in spans]
        gather = Gather(cache, np.asarray(table).ravel(), count)
        if min(contexts) == longest and (window is None or longest <= window):
            return cls(rows, gather, longest, None, None)
        mask = tokens_mask(hidden_tokens(upload(np.asarray(contexts), device), longest, window), dtype)
        starts = np.arange(2 * count) * width * cache.layout.block_tokens
        hidden = [
            np.arange(start + context, start + longest) for start, context in zip(starts, contexts * 2, strict=True)
        ]
        return cls(rows, gather, longest, upload(np.concatenate(hidden), device), mask)

    def attend(self, cache: KvTensors, layer: int, query: torch.Tensor) -> torch.Tensor:
        key, value = self.gather.of(layer, query.dtype, self.num_tokens, self.hidden)
        folded = query.view(len(query), cache.layout.num_kv_heads, -1, cache.layout.head_dim)
        result: torch.Tensor = F.scaled_dot_product_attention(folded, key, value, attn_mask=self.mask)
        return result.reshape(query.shape)


def rows_of(spans: Sequence[SequenceSpan], device: torch.device) -> torch.Tensor | slice:
    """Return the first rows of ``spans`` as an index: a slice if they are adjacent."""
    firsts = [span.first_row for span in spans]
    if firsts == list(range(firsts[0], firsts[0] + len(firsts))):
        return slice(firsts[0], firsts[0] + len(firsts))
    return upload(np.asarray(firsts), device)


def _similar_lengths(spans: Sequence[SequenceSpan]) -> list[list[SequenceSpan]]:
    """Group ``spans`` so that each has at least half the blocks of its group's longest; one group keeps their order."""
    lengths = [len(span.block_ids) for span in spans]
    if spans and 2 * min(lengths) >= max(lengths):
        return [list(spans)]
    groups: list[list[SequenceSpan]] = []
    for span in sorted(spans, key=lambda span: -len(span.block_ids)):
        if groups and 2 * len(span.block_ids) >= len(groups[-1][0].block_ids):
            groups[-1].append(span)
        else:
            groups.append([span])
    return groups
