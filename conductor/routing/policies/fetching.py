"""Ways for a worker to get a longer prefix than its own: from the store, or from the best holder.

Pure arithmetic for policies. A fetch runs while the request waits in the queue, so only the part that outlasts the wait
counts; nothing is fetched that could be computed sooner.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from msgspec import Struct

from tanghulu.conductor.routing.policies.base import (
    ASSUMED_STORE_BYTES_PER_S,
    PeerFetch,
    RequestView,
    Shown,
    WorkerView,
)

_send_wait_s = operator.attrgetter("send_wait_s")
_ttft_s = operator.attrgetter("ttft_s")


class Start(Struct, frozen=True):
    """A way to begin a prefill: seconds until it can start, then seconds of computing, with ``hit_blocks`` reused."""

    wait_s: float
    compute_s: float
    hit_blocks: int
    fetch_s: float = 0.0
    fetch: PeerFetch | None = None

    @property
    def ttft_s(self) -> float:
        """Estimated time to the first token."""
        return self.wait_s + self.compute_s


def best_source(workers: Sequence[WorkerView]) -> WorkerView | None:
    """Return the worker with the longest prefix (blocks being computed do not count), None if there is none.

    Any worker qualifies: one that decodes has the KV it continued from, and its answers. Among equals, the one whose
    NIC is free first, or became idle first: so sending rotates among the copies of a hot prefix, and all of them stay
    recently used.
    """
    holders = [workers[at] for at in workers.holders] if isinstance(workers, Shown) else workers
    most = max([w.hit_blocks for w in holders], default=0)
    return min([w for w in holders if w.hit_blocks == most], key=_send_wait_s) if most else None


def peer_fetch_s(request: RequestView, source: WorkerView, target: WorkerView) -> float:
    """Return the time until ``target`` has the blocks that ``source`` holds beyond its own."""
    num_blocks = source.hit_blocks - target.match_blocks
    taken_s = max(0.0, source.send_wait_s, target.receive_wait_s)
    bytes_per_s = request.link_bytes_per_s(source.place, target.place) or target.peer_bytes_per_s
    return taken_s + num_blocks * request.block_bytes / bytes_per_s


def nearest_source(request: RequestView, workers: Sequence[WorkerView], target: WorkerView) -> WorkerView | None:
    """Like ``best_source``, but of equally good holders return the one from which ``target`` has the prefix soonest."""
    best = best_source(workers)
    if best is None or request.links is None or not can_fetch(best, target):
        return best
    holders = [workers[at] for at in workers.holders] if isinstance(workers, Shown) else workers
    equals = [w for w in holders if w.hit_blocks == best.hit_blocks and w.id != target.id]
    return min(equals, key=lambda source: (peer_fetch_s(request, source, target), source.send_wait_s))


def can_fetch(source: WorkerView | None, target: WorkerView) -> bool:
    """Return whether ``source`` has blocks for ``target``, and a way to send them."""
    if source is None or target.peer_bytes_per_s == 0 or source.id == target.id:
        return False
    return source.hit_blocks > target.match_blocks


def own_start(request: RequestView, worker: WorkerView) -> Start:
    """Return the start with the blocks at the worker now or by the time its turn comes."""
    hit_blocks = worker.match_blocks
    return Start(worker.wait_s, worker.prefill_s(request, hit_blocks), hit_blocks)


def starts(request: RequestView, worker: WorkerView, source: WorkerView | None) -> list[Start]:
    """Return all ways for ``worker`` to begin; fetching from ``source`` or from the store only where possible."""
    ways = [own_start(request, worker)]
    if source is not None and can_fetch(source, worker):
        fetch_s = peer_fetch_s(request, source, worker)
        compute_s = worker.prefill_s(request, source.hit_blocks)
        fetch = PeerFetch(source.id, source.hit_blocks)
        ways.append(Start(max(worker.wait_s, fetch_s), compute_s, source.hit_blocks, fetch_s, fetch))
    if request.store_hit_blocks > worker.match_blocks:
        num_bytes = (request.store_hit_blocks - worker.match_blocks) * request.block_bytes
        fetch_s = num_bytes / (worker.store_bytes_per_s or ASSUMED_STORE_BYTES_PER_S)
        compute_s = worker.prefill_s(request, request.store_hit_blocks)
        ways.append(Start(max(worker.wait_s, fetch_s), compute_s, request.store_hit_blocks, fetch_s))
    return ways


def best_start(request: RequestView, worker: WorkerView, source: WorkerView | None) -> Start:
    """Return the one of ``starts`` with the lowest TTFT; among equals, the one that moves least."""
    return min(starts(request, worker, source), key=_ttft_s)
