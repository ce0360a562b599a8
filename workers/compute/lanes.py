"""A large step on several threads: each takes a share of the rows through the whole model, one lane per thread.

The usual way gives every product to all threads, which then meet some two hundred times a step, and leaves the work
between the products to one of them. But the rows of a step are independent except in attention, where the later rows of
a sequence see the earlier. So the step is cut into runs of rows of equal work, and each run is a step of its own on one
thread, which waits only, at every layer, for the K and V of the previous lane (`LaneTurn`).

Worked example: two prompts of 300 tokens on two threads, where attending to 2,000 tokens costs as much as all the rest
of a row. Row i of a prompt costs 1 + i / 2000, a prompt 322.6; the cut at half of the sum falls between the prompts,
and the lanes need not wait for each other. A prompt of 512 behind 512 costs 512 + 393,472 / 2000 = 708.7: the
first lane takes 268 rows, the second 244, which see more.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import torch

from tanghulu.workers.compute.forward_batch import LaneGate, LaneTurn, SequenceChunk, build_forward_batch
from tanghulu.workers.compute.kv_cache import KvTensors
from tanghulu.workers.compute.models.model import Model
from tanghulu.workers.weights.model_config import ModelConfig

#: Fewest rows of a lane; one with fewer reads the weights for too little.
LEAST_ROWS = 32
#: Most lanes of a step; with more threads each lane has several.
MOST_LANES = 64
#: Speed of attention as a share of the products': measured for SmolLM2, 53 of 75 GFLOP/s.
_ATTENTION_SPEED = 0.7


def context_like_row(config: ModelConfig) -> float:
    """Estimate, by counting multiplications, the context at which attention takes as long as the rest of a row."""
    width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rest = config.hidden * (2 * width + 2 * kv_width) + config.active_mlp_elements / config.num_layers
    return rest / (2 * width) * _ATTENTION_SPEED


def cut_lanes(chunks: Sequence[SequenceChunk], num_lanes: int, row_context: float) -> list[list[SequenceChunk]]:
    """Cut ``chunks`` into at most ``num_lanes`` runs of rows of equal work, in their order, none empty.

    ``row_context``: see `context_like_row`. A sequence's logits are computed by the lanes with its last rows.
    """
    contexts = np.concatenate([np.arange(chunk.start, chunk.end) for chunk in chunks]) + 1.0
    work = 1.0 + contexts / row_context
    done = np.cumsum(work)  # a row goes to the lane whose share holds its middle
    cuts = np.searchsorted(done - work / 2, done[-1] * np.arange(1, num_lanes) / num_lanes).tolist()
    bounds = sorted({0, *cuts, len(work)})
    return [_between(chunks, first, end) for first, end in pairwise(bounds)]


def _between(chunks: Sequence[SequenceChunk], first: int, end: int) -> list[SequenceChunk]:
    """Return rows ``first .. end`` of all ``chunks``."""
    found, row = [], 0
    for chunk in chunks:
        length = len(chunk.token_ids)
        low, high = max(0, first - row), min(length, end - row)
        if low < high:
            wanted = high - max(low, length - 1 - chunk.num_more_logits) if chunk.wants_logits else 0
            found.append(
                SequenceChunk(
                    chunk.token_ids[low:high],
                    chunk.start + low,
                    chunk.block_ids,
                    wanted > 0,
                    chunk.scores,
                    num_more_logits=max(0, wanted - 1),
                )
            )
        row += length
    return found


def turns_of(lanes: Sequence[Sequence[SequenceChunk]]) -> list[LaneTurn]:
    """Make the lanes' turns: neighbours that share a sequence get a gate between them."""
    gates = [LaneGate() if _continues(one[-1], other[0]) else None for one, other in pairwise(lanes)]
    return [LaneTurn(before, after) for before, after in zip([None, *gates], [*gates, None], strict=True)]


def _continues(chunk: SequenceChunk, following: SequenceChunk) -> bool:
    return chunk.block_ids is following.block_ids and chunk.end == following.start


class LanedForward:
    """Forward pass of ``model`` over ``cache``, on as many threads as the caller may use (torch's setting).

    ``most_lanes`` bounds the lanes: 1 where the model's ranks must meet in one order. Only one thread may call it.
    """

    def __init__(self, model: Model, cache: KvTensors, most_lanes: int = MOST_LANES) -> None:
        self._model, self._cache = model, cache
        self._most_lanes = most_lanes
        self._row_context = context_like_row(model.config)
        self._pool: ThreadPoolExecutor | None = None

    def __call__(self, chunks: Sequence[SequenceChunk]) -> torch.Tensor:
        """Compute the requested logits, float32 [L, vocab], in the order of ``chunks``; write their KV to the cache."""
        threads = torch.get_num_threads()
        num_rows = sum(len(chunk.token_ids) for chunk in chunks)
        num_lanes = min(threads, self._most_lanes, num_rows // LEAST_ROWS)
        if num_lanes < 2:
            return self._model.forward(build_forward_batch(chunks, self._cache.layout.block_tokens), self._cache)
        try:
            return self._forward(cut_lanes(chunks, num_lanes, self._row_context), threads // num_lanes)
        finally:
            torch.set_num_threads(threads)

    def _forward(self, lanes: Sequence[Sequence[SequenceChunk]], threads: int) -> torch.Tensor:
        """Compute every lane on ``threads`` threads of its own, the first in the calling thread."""
        first, *others = zip(lanes, turns_of(lanes), strict=True)
        self._pool = self._pool or ThreadPoolExecutor(MOST_LANES, "lane")
        futures = [self._pool.submit(self._lane, lane, turn, threads) for lane, turn in others]
        logits = [self._lane(*first, threads)]
        return torch.cat([*logits, *(future.result() for future in futures)])

    def _lane(self, chunks: Sequence[SequenceChunk], turn: LaneTurn, threads: int) -> torch.Tensor:
        torch.set_num_threads(threads)  # for the products started by this thread
        try:
            batch = build_forward_batch(chunks, self._cache.layout.block_tokens, turn=turn)
            return self._model.forward(batch, self._cache)
        finally:
            turn.end()
