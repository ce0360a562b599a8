"""Algorithm 1 of Mooncake (FAST'25): least queue + transfer + prefill, with cache load balancing.

A worker whose own prefix is shorter than the best one by more than a threshold factor fetches the best prefix, and so
replicates hot prefixes without further bookkeeping; any other computes what it lacks. As in the paper the transfer
adds to the queue instead of running beside it. Example with threshold 1.5: the best holder has 30 blocks; a worker with
20 (30 <= 20 * 1.5) computes 10 blocks itself, a worker with 19 is sent 11.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from tanghulu.conductor.policies.base import (
    ASSUMED_STORE_BYTES_PER_S,
    Candidate,
    Decision,
    PeerFetch,
    RequestView,
    WorkerView,
    prefillers,
)
from tanghulu.conductor.policies.decode import best_decode, decide
from tanghulu.conductor.policies.fetching import best_holder, can_fetch, peer_fetch_s
from tanghulu.types import InstanceId


class Mooncake:
    """Algorithm 1. ``balance_threshold``: how much longer the best prefix must be before it is fetched, a factor."""

    name = "mooncake"
    ranks = True

    def __init__(self, balance_threshold: float = 1.5, seed: int = 0) -> None:
        self._ties = random.Random(seed)
        self._threshold = balance_threshold

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Decision | None:
        """The pair of least TTFT by the paper's estimate."""
        able = prefillers(workers)
        source = best_holder(able)
        fetches = {w.id: self._fetch(w, source) for w in able}
        prefills = [self._candidate(request, w, source if fetches[w.id] else None) for w in able]
        return decide(request, workers, prefills, self._ties, fetches)

    def choose_decode(self, request: RequestView, workers: Sequence[WorkerView]) -> InstanceId | None:
        """The decode worker of least cost."""
        return best_decode(request, workers, self._ties)

    def _fetch(self, worker: WorkerView, source: WorkerView | None) -> PeerFetch | None:
        if source is None or not can_fetch(source, worker):
            return None
        if source.hit_blocks <= worker.match_blocks * self._threshold:
            return None
        return PeerFetch(source.id, source.hit_blocks)

    def _candidate(self, request: RequestView, worker: WorkerView, source: WorkerView | None) -> Candidate:
        hit_blocks, fetch_s = worker.match_blocks, 0.0
        if source is not None:
            hit_blocks, fetch_s = source.hit_blocks, peer_fetch_s(request, source, worker)
        elif request.store_hit_blocks > hit_blocks * self._threshold:
            num_bytes = (request.store_hit_blocks - hit_blocks) * request.block_bytes
            fetch_s = num_bytes / (worker.store_bytes_per_s or ASSUMED_STORE_BYTES_PER_S)
            hit_blocks = request.store_hit_blocks
        compute_s = worker.prefill_s(request, hit_blocks)
        terms = (
            ("queue_s", worker.wait_s),
            ("fetch_s", fetch_s),
            ("compute_s", compute_s),
            ("hit_blocks", float(hit_blocks)),
        )
        return Candidate(worker.id, "prefill", worker.wait_s + fetch_s + compute_s, terms)
