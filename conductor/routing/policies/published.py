"""Policies from papers and other systems, for comparison and for users coming from there.

**linear**: alpha * hit + beta * (1 - load) + gamma * nearness, the highest wins.

``hit`` is the share of the prompt's named blocks that the worker has or will have, ``load`` its queue over the longest
queue among the workers, ``nearness`` its distance class from the request's entry point (1 same host, 2/3 same rack, 1/3
same zone). Gamma is small: nearness decides between roughly equal workers, and never moves a warm prompt to a cold
worker. Example with alpha = beta = 0.5, gamma = 0.05: A holds 60 % and has the longest queue, far away: 0.3. B holds
nothing and is half as loaded, in the same rack: 0.25 + 0.033 = 0.283. A wins.

**dynamo**: a cost modelled on NVIDIA Dynamo's KV router.

    cost = overlap_weight * (queued + new prefill tokens) / block_tokens + active blocks with the request

New tokens are those after the worker's own prefix; blocks that only the store has are credited by ``store_credit`` (0
ignores them, 1 counts them like own ones). With temperature 0 the least cost wins; above it a worker is drawn by
softmax over the negative costs, normalised to 0..1. Example, blocks of 64: A has 40 of 100 blocks, 640 queued tokens,
200 active blocks including the request's 40: 60 + 10 + 260 = 330. B is idle and empty: 100 + 0 + 100 = 200. B wins.

**mooncake**: Algorithm 1 of Mooncake (FAST'25): least queue + transfer + prefill, with cache load balancing.

A worker whose own prefix is shorter than the best one by more than a threshold factor fetches the best prefix, and so
replicates hot prefixes without further bookkeeping; any other computes its missing blocks. As in the paper, the
transfer adds to the queue instead of overlapping it. Example with threshold 1.5: the best holder has 30 blocks; a
worker with 20 (30 <= 20 * 1.5) computes 10 blocks itself, a worker with 19 fetches 11.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tanghulu.conductor.routing.policies.base import (
    ASSUMED_STORE_BYTES_PER_S,
    Candidate,
    Decision,
    PeerFetch,
    RequestView,
    WorkerView,
    nearness,
    place_of_least,
    prefillers,
)
from tanghulu.conductor.routing.policies.decode import DecodesAtLeastCost, decide
from tanghulu.conductor.routing.policies.fetching import best_source, can_fetch, peer_fetch_s

_COST_TERMS = ("prefill_blocks", "active_blocks")


class Dynamo(DecodesAtLeastCost):
    """Overlap-weighted prefill blocks plus active blocks, with a temperature."""

    name = "dynamo"

    def __init__(
        self, overlap_weight: float = 1.0, temperature: float = 0.0, store_credit: float = 0.0, seed: int = 0
    ) -> None:
        self._weight = overlap_weight
        self._temperature = temperature
        self._store_credit = store_credit
        super().__init__(seed)

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Decision | None:
        able = prefillers(workers)
        if not able:
            return None
        costs = [self._weight * prefill + active for prefill, active in self._parts(request, able)]
        place = self._draw(costs) if self._temperature > 0 else place_of_least(costs, self._ties.prefill)

        def explain() -> list[Candidate]:
            return [
                Candidate(
                    w.id, "prefill", cost, (*zip(_COST_TERMS, parts, strict=True), ("hit_blocks", w.match_blocks))
                )
                for w, cost, parts in zip(able, costs, self._parts(request, able), strict=True)
            ]

        return decide(request, workers, able[place], self._ties, explain)

    def _parts(self, request: RequestView, able: Sequence[WorkerView]) -> list[tuple[float, float]]:
        """Return (prefill blocks, active blocks) of each."""
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
        """Draw a place by softmax over the negative costs."""
        low, high = min(costs), max(costs)
        if high == low:
            return self._ties.prefill.randrange(len(costs))
        weights = [math.exp(-(cost - low) / (high - low) / self._temperature) for cost in costs]
        return self._ties.prefill.choices(range(len(costs)), weights)[0]


_LEAST_S = 1e-9
_SCORE_TERMS = ("hit", "load", "nearness")


class LinearPolicy(DecodesAtLeastCost):
    """The linear score. A candidate's ``score`` is its negative, as the lowest score wins."""

    name = "linear"

    def __init__(self, alpha: float = 0.5, beta: float = 0.5, gamma: float = 0.05, seed: int = 0) -> None:
        super().__init__(seed)
        self._alpha, self._beta, self._gamma = alpha, beta, gamma

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Decision | None:
        able = prefillers(workers)
        if not able:
            return None
        scores = [
            self._alpha * hit + self._beta * (1 - load) + self._gamma * near
            for hit, load, near in self._parts(request, able)
        ]
        draw = self._ties.prefill.random
        place = max((score, draw(), at) for at, score in enumerate(scores))[2]

        def explain() -> list[Candidate]:
            return [
                Candidate(w.id, "prefill", -score, tuple(zip(_SCORE_TERMS, parts, strict=True)))
                for w, score, parts in zip(able, scores, self._parts(request, able), strict=True)
            ]

        return decide(request, workers, able[place], self._ties, explain)

    def _parts(self, request: RequestView, able: Sequence[WorkerView]) -> list[tuple[float, float, float]]:
        """Return (hit, load, nearness) of each."""
        longest_s, num_blocks, place = (
            max(_LEAST_S, *[w.wait_s for w in able]),
            request.named_blocks or request.num_blocks,
            request.place,
        )
        parts, known, near = [], None, 0.0
        for worker in able:
            if worker.place is not known:
                known, near = worker.place, nearness(place, worker.place)
            parts.append((worker.match_blocks / num_blocks, worker.wait_s / longest_s, near))
        return parts


_TIME_TERMS = ("queue_s", "fetch_s", "compute_s", "hit_blocks")


class Mooncake(DecodesAtLeastCost):
    """Algorithm 1. ``balance_threshold``: factor by which the best prefix must be longer before it is fetched."""

    name = "mooncake"

    def __init__(self, balance_threshold: float = 1.5, seed: int = 0) -> None:
        super().__init__(seed)
        self._threshold = balance_threshold

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Decision | None:
        able = prefillers(workers)
        if not able:
            return None
        source = best_source(workers)
        starts = [self._start(request, w, source) for w in able]
        scores = [wait_s + fetch_s + compute_s for wait_s, fetch_s, compute_s, _, _ in starts]
        place = place_of_least(scores, self._ties.prefill)
        fetches = starts[place][4]
        fetch = PeerFetch(source.id, source.hit_blocks) if fetches and source is not None else None

        def explain() -> list[Candidate]:
            return [
                Candidate(w.id, "prefill", score, tuple(zip(_TIME_TERMS, map(float, start), strict=False)))
                for w, score, start in zip(able, scores, starts, strict=True)
            ]

        return decide(request, workers, able[place], self._ties, explain, fetch)

    def _start(
        self, request: RequestView, worker: WorkerView, source: WorkerView | None
    ) -> tuple[float, float, float, int, bool]:
        """Return (queue, fetch, prefill in s, blocks reused, whether they are fetched from ``source``)."""
        hit_blocks, fetch_s, fetches = worker.match_blocks, 0.0, False
        if source is not None and source.hit_blocks > hit_blocks * self._threshold and can_fetch(source, worker):
            fetches, fetch_s, hit_blocks = True, peer_fetch_s(request, source, worker), source.hit_blocks
        elif request.store_hit_blocks > hit_blocks * self._threshold:
            num_bytes = (request.store_hit_blocks - hit_blocks) * request.block_bytes
            fetch_s = num_bytes / (worker.store_bytes_per_s or ASSUMED_STORE_BYTES_PER_S)
            hit_blocks = request.store_hit_blocks
        return worker.wait_s, fetch_s, worker.prefill_s(request, hit_blocks), hit_blocks, fetches
