"""What one step feeds the model: flat tokens of many sequences, and where their KV lies.

Built from plain numbers by `build_forward_batch`; the model and the attention backend only read it.

Worked example, blocks of 4 tokens. Sequence A (blocks 7, 2) has 5 tokens cached and computes its 6th and 7th;
sequence B (block 9) decodes its 3rd token. Then ``token_ids`` has 3 entries, ``positions`` = [5, 6, 2], and the
places in the cache are block 2 offsets 1 and 2, block 9 offset 2. Logits are wanted for rows 1 and 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tanghulu.workers.compute.device import CPU, upload
from tanghulu.workers.compute.lane_turn import LaneTurn
from tanghulu.workers.compute.prompt_scoring import ScoredRows
from tanghulu.workers.engine.prompt_scores import PromptScoreArrays


@dataclass(frozen=True, slots=True)
class SequenceChunk:
    """The run of tokens ``start .. start+len(token_ids)`` of one sequence that a step computes.

    ``block_ids`` covers the sequence from its first token to at least the end of the run. ``wants_logits``
    asks for the logits of the run's last token and of the ``num_more_logits`` before it. ``scores`` are to be filled in
    from the logits of those of its tokens that stand in front of a scored one.
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
    """Where the KV of a batch of decodes lies, one token a sequence, all of it on the device.

    ``tables`` int64 [N, width], the blocks of each sequence and then any others; ``contexts`` int64 [N], its tokens.
    """

    tables: torch.Tensor
    contexts: torch.Tensor


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The tensors of a step of N tokens of S sequences, of which L logits are wanted.

    ``token_ids`` and ``positions``: int64 [N]. ``blocks`` and ``offsets``: int64 [N], the block that each
    token's KV goes to and its place inside. ``logit_rows``: int64 [L], in the order of the tokens. A batch of
    static shape (`decode_batch`) has ``decodes`` instead of ``spans``. One that is a lane of a step has its ``turn``.
    The logits of ``scored`` rows give log probabilities of prompts.
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
    """Return the rows of ``chunk``, which begins at ``first_row``, that give some of its scores."""
    scores = chunk.scores
    if scores is None:
        return None
    first, end = max(scores.position, chunk.start + 1), min(scores.end, chunk.end + 1)
    if first >= end:
        return None
    part = scores.part(first - scores.position, end - scores.position)
    return ScoredRows(first_row + first - 1 - chunk.start, part)
