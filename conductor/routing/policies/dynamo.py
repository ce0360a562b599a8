"""A cost like that of NVIDIA Dynamo's KV router, for comparison and for those who come from there.

    cost = overlap_weight * (queued + new prefill tokens) / block_tokens + active blocks with the request

New tokens are those behind the worker's own prefix; blocks that only the store has are credited by ``store_credit``
(0: not at all, 1: like own ones). With temperature 0 the least cost wins; above it a worker is drawn by softmax over
the negative costs, normalised to 0..1. Example, blocks of 64: A has 40 of 100 blocks, 640 queued tokens, 200 active
blocks of which the request's 40 are some: 60 + 10 + 260 = 330. B is idle and empty: 100 + 0 + 100 = 200. B it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tanghulu.conductor.routing.policies.base import (
    Candidate,
    Decision,
    RequestView,
    WorkerView,
    place_of_least,
    prefillers,
)
from tanghulu.conductor.routing.policies.decode import Ties, best_decode, decide
from tanghulu.types import InstanceId

_TERMS = ("prefill_blocks", "active_blocks")


class Dynamo:
    """Overlap-weighted prefill blocks plus active blocks, with a temperature."""

    name = "dynamo"
    ranks = True

    def __init__(
        self, overlap_weight: float = 1.0, temperature: float = 0.0, store_credit: float = 0.0, seed: int = 0
    ) -> None:
        self._weight = overlap_weight
        self._temperature = temperature
        self._store_credit = store_credit
        self._ties = Ties(seed)

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Decision | None:
        able = prefillers(workers)
        if not able:
            return None
        costs = [self._weight * prefill + active for prefill, active in self._parts(request, able)]
        place = self._draw(costs) if self._temperature > 0 else place_of_least(costs, self._ties.prefill)

        def explain() -> list[Candidate]:
            return [
                Candidate(w.id, "prefill", cost, (*zip(_TERMS, parts, strict=True), ("hit_blocks", w.match_blocks)))
                for w, cost, parts in zip(able, costs, self._parts(request, able), strict=True)
            ]

        return decide(request, workers, able[place], self._ties, explain)

    def choose_decode(self, request: RequestView, workers: Sequence[WorkerView]) -> InstanceId | None:
        return best_decode(request, workers, self._ties)

    def _parts(self, request: RequestView, able: Sequence[WorkerView]) -> list[tuple[float, float]]:
        """(prefill blocks, active blocks) of each."""
        num_tokens, block_tokens, num_blocks = request.num_tokens, request.block_tokens, request.num_blocks
        in_store, credit = request.store_hit_blocks, self._store_credit
        parts = []
        for worker in able:
            own = worker.match_blocks
            credited = own + credit * (in_store - own) if credit and in_store > own else own
            new_tokens = max(0.0, num_tokens - credited * block_tokens)
            active = worker.active_blocks + num_blocks - min(num_blocks, worker.active_hit_blocks)
            parts.append(((worker.queue_tokens + new_tokens) / block_tokens, float(active)))
        return parts

    def _draw(self, costs: list[float]) -> int:
        """A place by softmax over the negative costs."""
        low, high = min(costs), max(costs)
        if high == low:
            return self._ties.prefill.randrange(len(costs))
        weights = [math.exp(-(cost - low) / (high - low) / self._temperature) for cost in costs]
        return self._ties.prefill.choices(range(len(costs)), weights)[0]
