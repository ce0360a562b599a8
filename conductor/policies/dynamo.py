"""A cost like that of NVIDIA Dynamo's KV router, for comparison and for those who come from there.

    cost = overlap_weight * (queued + new prefill tokens) / block_tokens + active blocks with the request

New tokens are those behind the worker's own prefix; blocks that only the store has are credited by ``store_credit``
(0: not at all, 1: like own ones). With temperature 0 the least cost wins; above it a worker is drawn by softmax over
the negative costs, normalised to 0..1. Example, blocks of 64: A has 40 of 100 blocks, 640 queued tokens, 200 active
blocks of which the request's 40 are some: 60 + 10 + 260 = 330. B is idle and empty: 100 + 0 + 100 = 200. B it is.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

from tanghulu.conductor.policies.base import Candidate, Decision, RequestView, WorkerView, prefillers
from tanghulu.conductor.policies.decode import best_decode, decide
from tanghulu.types import InstanceId


class Dynamo:
    """Overlap-weighted prefill blocks plus active blocks, with a temperature."""

    name = "dynamo"
    ranks = True

    def __init__(
        self, overlap_weight: float = 1.0, temperature: float = 0.0, store_credit: float = 0.0, seed: int = 0
    ) -> None:
        self._overlap_weight = overlap_weight
        self._temperature = temperature
        self._store_credit = store_credit
        self._random = random.Random(seed)

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Decision | None:
        """The pair of least cost, or a draw by cost."""
        prefills = [self._candidate(request, w) for w in prefillers(workers)]
        if self._temperature > 0 and prefills:
            prefills = self._draw(prefills)
        return decide(request, workers, prefills, self._random)

    def choose_decode(self, request: RequestView, workers: Sequence[WorkerView]) -> InstanceId | None:
        """The decode worker of least cost."""
        return best_decode(request, workers, self._random)

    def _candidate(self, request: RequestView, worker: WorkerView) -> Candidate:
        own = worker.match_blocks
        credited = own + self._store_credit * max(0, request.store_hit_blocks - own)
        new_tokens = max(0.0, request.num_tokens - credited * request.block_tokens)
        prefill_blocks = (worker.queue_tokens + new_tokens) / request.block_tokens
        active = worker.active_blocks + request.num_blocks - min(request.num_blocks, worker.active_hit_blocks)
        terms = (("prefill_blocks", prefill_blocks), ("active_blocks", float(active)), ("hit_blocks", float(own)))
        return Candidate(worker.id, "prefill", self._overlap_weight * prefill_blocks + active, terms)

    def _draw(self, candidates: list[Candidate]) -> list[Candidate]:
        """The same candidates; the one that was drawn is put in front by a score of minus infinity."""
        ordered = sorted(candidates, key=lambda c: c.worker)
        low, high = min(c.score for c in ordered), max(c.score for c in ordered)
        spread = (high - low) or 1.0
        weights = [math.exp(-(c.score - low) / spread / self._temperature) for c in ordered]
        drawn = self._random.choices(ordered, weights)[0]
        return [replace(c, score=-math.inf) if c.worker == drawn.worker else c for c in candidates]
