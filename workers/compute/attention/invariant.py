"""Attention whose result for a token depends bit by bit only on earlier tokens: not on chunks, batch or cache.

Kernels sum in an order that follows from the shapes of their inputs. So every kernel call for a token's query has a
shape that follows from the token's position. A sequence's positions are cut into *tiles* of `QUERY_TILE`, and a query
has a fixed place in its tile, whatever else the step computes of that tile: the other places are filled with zeros. A
tile sees the keys of all *spans* of `KEY_SPAN` positions up to its own, masked behind each query. Several tiles with
the same number of spans share a call as its batch, whose entries the kernel computes one by one.

Worked example: position 130 is at place 2 of the tile 128 .. 131 and sees 256 keys, of which 125 are hidden. This holds
in a prompt computed at once, in a chunk that begins at 129, behind a cached prefix and as a decode. A window only hides
more of the keys.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tanghulu.workers.compute.attention.base import AttentionBackend, AttentionWork, Gather, rows_of
from tanghulu.workers.compute.device import upload
from tanghulu.workers.compute.forward_batch import ForwardBatch, SequenceSpan
from tanghulu.workers.compute.kv_cache import KvTensors

#: Positions of a tile. A decode computes all of it: with 4 that cost it nothing measurable, and prompts at most 1.3
#: times as much as pieces of 128, whereas a tile of 1 made prompts take 8 times and one of 16 decodes 3 times as long.
QUERY_TILE = 4
#: Positions of a span of keys, a multiple of `QUERY_TILE`: a prompt's calls have as many tiles as fit into it.
KEY_SPAN = 128


class InvariantAttention(AttentionBackend):
    """The backend of ``--batch-invariant``, by torch's SDPA."""

    def work(
        self, cache: KvTensors, batch: ForwardBatch, num_heads: int, dtype: torch.dtype, window: int | None
    ) -> list[AttentionWork]:
        """Cut runs of prompts into tiles, group the decodes that see equally many spans."""
        assert batch.decodes is None, "a batch of static shape has no absolute positions"
        heads = _Heads(num_heads // cache.layout.num_kv_heads, dtype, window)
        work: list[AttentionWork] = []
        decodes: dict[int, list[SequenceSpan]] = defaultdict(list)
        for span in batch.spans:
            if span.num_new == 1:
                decodes[_width(span.context)].append(span)
            else:
                work.append(_Tiled.of_run(cache, span, heads))
        return work + [_Tiled.of_decodes(cache, spans, heads) for spans in decodes.values()]


def _width(context: int) -> int:
    """Return the number of keys seen by a query of position ``context - 1``, including the hidden ones."""
    return -(-context // KEY_SPAN) * KEY_SPAN


class _Heads(NamedTuple):
    """Parameters of masks: query heads of a KV head, their type, and positions that a query sees (None: all)."""

    groups: int
    dtype: torch.dtype
    window: int | None


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Whole tiles that see ``mask.shape[-1]`` keys. ``places`` of the tiles' rows belong to queries number ``rows``.

    ``mask`` [tiles, 1, QUERY_TILE x groups, keys].
    """

    rows: slice
    places: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def of(cls, first: int, positions: np.ndarray, tiles: np.ndarray, heads: _Heads, device: torch.device) -> Self:
        """Return queries number ``first`` and after, at ``positions`` of one span, in ``tiles``: a tile number each.

        ``tiles`` counts from 0 without gaps; queries with one number share a tile.
        """
        starts = np.zeros(int(tiles[-1]) + 1, dtype=np.int64)  # position of each tile's first place
        starts[tiles] = positions - positions % QUERY_TILE
        at = upload(starts[:, None] + np.arange(QUERY_TILE), device)[:, :, None]
        keys = torch.arange(_width(int(positions[-1]) + 1), device=device)
        hidden = keys > at if heads.window is None else (keys > at) | (keys <= at - heads.window)
        mask = torch.zeros(hidden.shape, dtype=heads.dtype, device=device).masked_fill_(hidden, float("-inf"))
        places = upload(tiles * QUERY_TILE + positions % QUERY_TILE, device)
        rows = slice(first, first + len(positions))
        return cls(rows, places, mask.repeat_interleave(heads.groups, dim=1)[:, None])

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attend ``query`` [rows, heads, head_dim] to K and V, [1 or tiles, kv_heads, tokens, head_dim] each."""
        num_tiles, _, _, num_keys = self.mask.shape
        _, num_heads, head_dim = query.shape
        shape = (num_tiles, QUERY_TILE, key.shape[1], num_heads // key.shape[1], head_dim)
        filled = query.new_zeros(num_tiles * QUERY_TILE, num_heads, head_dim).index_copy_(0, self.places, query)
        folded = filled.view(shape).transpose(1, 2).reshape(num_tiles, key.shape[1], -1, head_dim)
        key, value = (each[:, :, :num_keys].expand(num_tiles, -1, -1, -1) for each in (key, value))
        result = _attend(folded, key, value, self.mask)
        unfolded = result.view(num_tiles, key.shape[1], QUERY_TILE, -1, head_dim).transpose(1, 2)
        return unfolded.reshape(filled.shape).index_select(0, self.places)


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Run SDPA with a kernel whose grid is the batch: on GPUs the others would split it, or choose by its size."""
    if query.device.type == "cpu":
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


@dataclass(frozen=True, slots=True)
class _Tiled:
    """Some ``rows`` of a batch, in ``pieces``: one sequence's run, or decodes of sequences with equally many spans.

    ``hidden`` are the places, among all gathered tokens, of those behind the sequences, first of K and then of V.
    """

    rows: torch.Tensor | slice
    gather: Gather
    num_tokens: int
    hidden: torch.Tensor
    pieces: tuple[_Tiles, ...]

    @classmethod
    def of_run(cls, cache: KvTensors, span: SequenceSpan, heads: _Heads) -> Self:
        device, start, end = cache.rows.device, span.context - span.num_new, span.context
        bounds = [start, *range(start // KEY_SPAN * KEY_SPAN + KEY_SPAN, end, KEY_SPAN), end]
        pieces = []
        for low, high in pairwise(bounds):
            positions = np.arange(low, high)
            tiles = positions // QUERY_TILE - low // QUERY_TILE
            pieces.append(_Tiles.of(low - start, positions, tiles, heads, device))
        rows = slice(span.first_row, span.first_row + span.num_new)
        return cls(rows, *_gathered(cache, [span]), tuple(pieces))

    @classmethod
    def of_decodes(cls, cache: KvTensors, spans: Sequence[SequenceSpan], heads: _Heads) -> Self:
        device = cache.rows.device
        positions = np.array([span.context - 1 for span in spans])
        piece = _Tiles.of(0, positions, np.arange(len(spans)), heads, device)
        return cls(rows_of(spans, device), *_gathered(cache, spans), (piece,))

    def attend(self, cache: KvTensors, layer: int, query: torch.Tensor) -> torch.Tensor:
        key, value = self.gather.of(layer, query.dtype, self.num_tokens, self.hidden)
        out = torch.empty_like(query)
        for piece in self.pieces:
            out[piece.rows] = piece.attend(query[piece.rows], key, value)
        return out


def _gathered(cache: KvTensors, spans: Sequence[SequenceSpan]) -> tuple[Gather, int, torch.Tensor]:
    """Prepare the gather of ``spans``, all with one `_width`: the gather, tokens of each, and places to be zeroed."""
    count, block_tokens, num_keys = len(spans), cache.layout.block_tokens, _width(spans[0].context)
    num_blocks = -(-num_keys // block_tokens)
    # Filled with the sequence's own first block: any readable block does, as the mask hides it.
    table = [span.block_ids + span.block_ids[:1] * (num_blocks - len(span.block_ids)) for span in spans]
    num_tokens = num_blocks * block_tokens
    ends = [np.arange(row * num_tokens + span.context, (row + 1) * num_tokens) for row, span in enumerate(spans)]
    hidden = np.concatenate([*ends, *(end + count * num_tokens for end in ends)])
    gather = Gather(cache, np.asarray(table, dtype=np.int64).ravel(), count)
    return gather, num_keys, upload(hidden, cache.rows.device)
