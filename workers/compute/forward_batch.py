"""Model input of one step: flat tokens of many sequences, and the places of their KV.

Built from plain numbers by `build_forward_batch`; the model and the attention backend only read it.

Worked example, blocks of 4 tokens. Sequence A (blocks 7, 2) has 5 tokens cached and computes its 6th and 7th; sequence
B (block 9) decodes its 3rd token. Then ``token_ids`` has 3 entries, ``positions`` = [5, 6, 2], and the places in the
cache are block 2 offsets 1 and 2, block 9 offset 2. Logits are computed for rows 1 and 2.

Lanes (`tanghulu.workers.compute.lanes`) wait for each other where a sequence was cut in two: it attends to its own
earlier half. Rows of a step meet only in attention, where the later rows of a sequence see the earlier ones and not the
other way round. So a lane waits only, layer by layer, until the previous lane has written its K and V (`LaneTurn`); the
first never waits.

A step in which every sequence decodes one token is one tensor of static shape (`decode_batch`). Shapes are rounded up,
widths to powers of two and numbers of sequences to powers of two or multiples of 8, so that a few captured graphs
(`cuda_graphs`) serve all steps, and few computed rows are filling. The filling is harmless: a filling row
is a sequence of one token in the scratch block, which is read by nobody else; a filling column names the scratch block,
and the mask hides it.

The tensor is int64 [sequences, 2 + blocks]: token, position, block table. All else follows from it on the device, so a
step uploads nothing more. Worked example, blocks of 4 tokens, scratch block 50: sequence A (blocks 7, 2) decodes its
7th token 11, B (block 9) its 3rd token 12, C (blocks 4, 5, 6) its 9th token 13. Filled to 4 sequences of 4 blocks:

    [[11, 6, 7, 2, 50, 50],
     [12, 2, 9, 50, 50, 50],
     [13, 8, 4, 5, 6, 50],
     [0, 0, 50, 50, 50, 50]]
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tanghulu.workers.compute.device import CPU, upload
from tanghulu.workers.compute.prompt_scoring import ScoredRows
from tanghulu.workers.engine.step import PromptScoreArrays


class LaneGate:
    """Counts the layers of K and V written by a lane; the next lane waits here."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_written = 0
        self._ended = False

    def open(self, layer: int) -> None:
        """Mark the layers up to and including ``layer`` as written."""
        with self._changed:
            self._num_written = layer + 1
            self._changed.notify()

    def end(self) -> None:
        """Mark that the lane will write nothing more."""
        with self._changed:
            self._ended = True
            self._changed.notify()

    def wait(self, layer: int) -> None:
        """Wait until ``layer`` is written; raises RuntimeError if the previous lane ended without writing it."""
        with self._changed:
            while self._num_written <= layer:
                if self._ended:
                    raise RuntimeError(f"the lane before ended with {self._num_written} layers of KV, not {layer + 1}")
                self._changed.wait()


class LaneTurn:
    """A lane's place among its neighbours: the gate at which it waits and the one it opens, if any."""

    def __init__(self, before: LaneGate | None, after: LaneGate | None) -> None:
        self._before, self._after = before, after

    def written(self, layer: int) -> None:
        """Mark K and V of ``layer`` as written by the lane; returns when the previous lanes have written theirs."""
        if self._before is not None:
            self._before.wait(layer)
        if self._after is not None:
            self._after.open(layer)

    def end(self) -> None:
        """Mark the lane as done or failed, so that the next one does not wait for it."""
        if self._after is not None:
            self._after.end()


@dataclass(frozen=True, slots=True)
class SequenceChunk:
    """The run of tokens ``start .. start+len(token_ids)`` of one sequence that a step computes.

    ``block_ids`` covers the sequence from its first token to at least the end of the run. ``wants_logits`` requests the
    logits of the run's last token and of the ``num_more_logits`` before it. ``scores`` are to be filled in from the
    logits of those of its tokens that precede a scored one.
    """

    token_ids: Sequence[int] | np.ndarray
    start: int
    block_ids: Sequence[int]
    wants_logits: bool
    scores: PromptScoreArrays | None = None
    num_more_logits: int = 0

    @property
    def end(self) -> int:
        """Number of tokens of the sequence once the run is computed."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class SequenceSpan:
    """One sequence inside the flat batch: rows ``first_row .. first_row+num_new``, ``context`` tokens in all."""

    first_row: int
    num_new: int
    context: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DecodeTables:
    """Places of the KV of a batch of decodes, one token per sequence, all on the device.

    ``tables`` int64 [N, width], the blocks of each sequence and then any others; ``contexts`` int64 [N], its tokens.
    """

    tables: torch.Tensor
    contexts: torch.Tensor


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Tensors of a step of N tokens of S sequences, with L requested logits.

    ``token_ids`` and ``positions``: int64 [N]. ``blocks`` and ``offsets``: int64 [N], the block of each token's KV and
    its place inside. ``logit_rows``: int64 [L], in the order of the tokens. A batch of static shape (`decode_batch`)
    has ``decodes`` instead of ``spans``. A lane of a step has its ``turn``. The logits of ``scored`` rows give log
    probabilities of prompts.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    blocks: torch.Tensor
    offsets: torch.Tensor
    spans: tuple[SequenceSpan, ...]
    logit_rows: torch.Tensor
    decodes: DecodeTables | None = None
    turn: LaneTurn | None = None
    scored: tuple[ScoredRows, ...] = ()

    @property
    def num_tokens(self) -> int:
        """N, the tokens computed by this step."""
        return len(self.token_ids)


def build_forward_batch(
    chunks: Sequence[SequenceChunk], block_tokens: int, device: torch.device = CPU, turn: LaneTurn | None = None
) -> ForwardBatch:
    """Lay ``chunks`` flat, in their order, on ``device``; ``turn``, if they are a lane of a step."""
    assert chunks, "a step without tokens has no forward batch"
    spans: list[SequenceSpan] = []
    token_ids, positions, blocks = [], [], []
    logit_rows: list[int] = []
    scored: list[ScoredRows] = []
    row = 0
    for chunk in chunks:
        num_new = len(chunk.token_ids)
        assert num_new > 0, "an empty run"
        num_blocks = -(-chunk.end // block_tokens)
        table = tuple(chunk.block_ids[:num_blocks])
        assert len(table) == num_blocks, f"{len(table)} blocks for {chunk.end} tokens"
        at = np.arange(chunk.start, chunk.end)
        token_ids.append(np.asarray(chunk.token_ids, dtype=np.int64))
        positions.append(at)
        blocks.append(np.asarray(table, dtype=np.int64)[at // block_tokens])
        spans.append(SequenceSpan(row, num_new, chunk.end, table))
        if (own := _scored_rows(chunk, row)) is not None:
            scored.append(own)
        row += num_new
        if chunk.wants_logits:
            logit_rows += range(row - 1 - chunk.num_more_logits, row)
    wanted = np.asarray(logit_rows, dtype=np.int64)
    flat = upload(np.concatenate([*token_ids, *positions, *blocks, wanted]), device)  # one copy to the device
    ids, where, places, rows = torch.split(flat, [row, row, row, len(wanted)])
    return ForwardBatch(ids, where, places, where % block_tokens, tuple(spans), rows, turn=turn, scored=tuple(scored))


def _scored_rows(chunk: SequenceChunk, first_row: int) -> ScoredRows | None:
    """Return the rows of ``chunk``, beginning at ``first_row``, that yield some of its scores."""
    scores = chunk.scores
    if scores is None:
        return None
    first, end = max(scores.position, chunk.start + 1), min(scores.end, chunk.end + 1)
    if first >= end:
        return None
    part = scores.part(first - scores.position, end - scores.position)
    return ScoredRows(first_row + first - 1 - chunk.start, part)


#: Narrowest table: hiding a few unused columns costs nothing, while every width is a graph of its own.
MIN_BLOCKS = 4
_NUM_FIELDS = 2


class DecodeShape(NamedTuple):
    """Shape of a batch of decodes: its number of sequences, and of blocks of each."""

    num_sequences: int
    num_blocks: int

    @classmethod
    def of(cls, chunks: Sequence[SequenceChunk], block_tokens: int) -> DecodeShape:
        """Return the smallest shape into which ``chunks`` fit."""
        widest = max(-(-chunk.end // block_tokens) for chunk in chunks)
        return cls(_rows(len(chunks)), max(MIN_BLOCKS, _power_of_two(widest)))

    @classmethod
    def up_to(cls, num_sequences: int, num_blocks: int) -> list[DecodeShape]:
        """Return all shapes of steps of as many sequences of as many blocks, narrow ones first, then the largest."""
        sizes = sorted({_rows(count) for count in range(1, num_sequences + 1)}, reverse=True)
        widths = sorted({max(MIN_BLOCKS, _power_of_two(count)) for count in range(1, num_blocks + 1)})
        return [cls(size, width) for width in widths for size in sizes]

    @property
    def packed(self) -> tuple[int, int]:
        return (self.num_sequences, _NUM_FIELDS + self.num_blocks)


def is_decode(chunks: Sequence[SequenceChunk]) -> bool:
    """Return whether every sequence computes one token and requests its logits."""
    return all(len(chunk.token_ids) == 1 and chunk.wants_logits and chunk.scores is None for chunk in chunks)


def pack_decodes(
    chunks: Sequence[SequenceChunk], shape: DecodeShape, block_tokens: int, scratch: int
) -> npt.NDArray[np.int64]:
    """Pack ``chunks`` (`is_decode`) as rows into an array of ``shape``, filled with block ``scratch``."""
    packed = np.zeros(shape.packed, dtype=np.int64)
    packed[:, _NUM_FIELDS:] = scratch
    for row, chunk in zip(packed, chunks, strict=False):
        num_blocks = -(-chunk.end // block_tokens)
        row[:_NUM_FIELDS] = chunk.token_ids[0], chunk.start
        row[_NUM_FIELDS : _NUM_FIELDS + num_blocks] = chunk.block_ids[:num_blocks]
    return packed


def decode_batch(packed: torch.Tensor, block_tokens: int) -> ForwardBatch:
    """Make the batch of ``packed``, by operations on its device alone. Logits of all rows are computed."""
    token_ids, positions, tables = packed[:, 0], packed[:, 1], packed[:, _NUM_FIELDS:]
    blocks = tables.gather(1, (positions // block_tokens)[:, None])[:, 0]
    return ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        blocks=blocks,
        offsets=positions % block_tokens,
        spans=(),
        logit_rows=torch.arange(len(packed), device=packed.device),
        decodes=DecodeTables(tables, positions + 1),
    )


def _rows(count: int) -> int:
    """Return the number of rows of a step of ``count`` sequences: a power of two up to 16, then a multiple of 8."""
    return _power_of_two(count) if count <= 16 else -(-count // 8) * 8


def _power_of_two(count: int) -> int:
    """Return the least power of two that is at least ``count``."""
    return 1 << (count - 1).bit_length()
