"""Algorithm 1 of Mooncake (FAST'25): least queue + transfer + prefill, with cache load balancing.

A worker whose own prefix is shorter than the best one by more than a threshold factor fetches the best prefix, and so
replicates hot prefixes without further bookkeeping; any other computes what it lacks. As in the paper the transfer
adds to the queue instead of running beside it. Example with threshold 1.5: the best holder has 30 blocks; a worker with
20 (30 <= 20 * 1.5) computes 10 blocks itself, a worker with 19 is sent 11.
"""

from __future__ import annotations

from collections.abc import Sequence

from tanghulu.conductor.routing.policies.base import (
    ASSUMED_STORE_BYTES_PER_S,
    Candidate,
    Decision,
    PeerFetch,
    RequestView,
    WorkerView,
    place_of_least,
    prefillers,
)
from tanghulu.conductor.routing.policies.decode import Ties, best_decode, decide
from tanghulu.conductor.routing.policies.fetching import best_source, can_fetch, peer_fetch_s
from tanghulu.types import InstanceId

_TERMS = ("queue_s", "fetch_s", "compute_s", "hit_blocks")


class Mooncake:
    """Algorithm 1. ``balance_threshold``: how much longer the best prefix must be before it is fetched, a factor."""

    name = "mooncake"
    ranks = True

    def __init__(self, balance_threshold: float = 1.5, seed: int = 0) -> None:
        self._ties = Ties(seed)
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
                Candidate(w.id, "prefill", score, tuple(zip(_TERMS, map(float, start), strict=False)))
                for w, score, start in zip(able, scores, starts, strict=True)
            ]

        return decide(request, workers, able[place], self._ties, explain, fetch)

    def choose_decode(self, request: RequestView, workers: Sequence[WorkerView]) -> InstanceId | None:
        return best_decode(request, workers, self._ties)

    def _start(
        self, request: RequestView, worker: WorkerView, source: WorkerView | None
    ) -> tuple[float, float, float, int, bool]:
        """(queue, fetch, prefill in s, blocks reused, whether they are fetched from ``source``)."""
        hit_blocks, fetch_s, fetches = worker.match_blocks, 0.0, False
        if source is not None and source.hit_blocks > hit_blocks * self._threshold and can_fetch(source, worker):
            fetches, fetch_s, hit_blocks = True, peer_fetch_s(request, source, worker), source.hit_blocks
        elif request.store_hit_blocks > hit_blocks * self._threshold:
            num_bytes = (request.store_hit_blocks - hit_blocks) * request.block_bytes
            fetch_s = num_bytes / (worker.store_bytes_per_s or ASSUMED_STORE_BYTES_PER_S)
            hit_blocks = request.store_hit_blocks
        return worker.wait_s, fetch_s, worker.prefill_s(request, hit_blocks), hit_blocks, fetches
