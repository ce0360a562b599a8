"""The default policy: the prefill worker with the least estimated TTFT, the decode worker where KV and room are.

    TTFT = max(queue, fetch) + prefill of the rest

with the longest prefix that is at the worker, is being computed there for a request in front, or can be fetched from
the best other holder or from the store, where fetching pays. (After Mooncake, FAST'25, algorithm 1; there a fetch adds
to the queue, and blocks that are still being computed do not count.)

Example: 6400 tokens in blocks of 64, 2 MiB a block, 10 000 tokens/s. Worker A is idle and holds 20 blocks: (6400 -
1280) / 10 000 = 0.51 s. Worker B holds 90 but has 8000 tokens in its queue: 0.8 + 0.064 = 0.86 s. With all 100 blocks
in the store at 2 GB/s A fetches 80 blocks in 0.08 s and computes one token: 0.08 s. A it is.

A prefix that is fetched from another worker is held twice from then on, and the room that the copy takes was some other
prefix's, which will have to be computed when it is asked for again. So a copy is charged what it saves, times
``replica_weight``: with 1, workers are ranked as if nobody could fetch and the one
that was chosen fetches where that pays. In replay near saturation this spares about 60 % of the copies and
takes a tenth off the mean TTFT (docs/scheduling.md). What comes from the store is charged nothing: it stays there.

A worker that computes keeps everybody waiting who comes behind, and nobody has come yet when the choice is made. So
every second of computing counts ``load_weight`` times more than once: a worker that has the prefix is worth waiting for
longer than the one request alone would wait. With 0 a short queue elsewhere draws requests away from what they could
reuse, caches fill with copies, and near saturation all compute everything: without fetches the conversation trace has a
mean TTFT of 50 s so, of 17.7 s with 1, 8.6 s with 3, 3.6 s with 6 and 3.4 s with 12 (with fetches 2.70 s and 2.60 to
2.64 s). Example: A is idle and would compute for 0.5 s, B has the prefix, 0.9 s of queue and 0.05 s of rest. Alone the
request starts sooner at A, 0.5 s against 0.95; with 6 the scores are 3.5 and 1.25, and it waits for B.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence

from tanghulu.conductor.policies.base import (
    ASSUMED_STORE_BYTES_PER_S,
    Candidate,
    Decision,
    RequestView,
    WorkerView,
    place_of_least,
    prefillers,
)
from tanghulu.conductor.policies.decode import NO_ROOM_FINE_S, Ties, best_decode, decide
from tanghulu.conductor.policies.fetching import Start, best_holder, best_start, own_start, peer_fetch_s
from tanghulu.types import InstanceId

_wait_s = operator.attrgetter("wait_s")


def _ttft(
    request: RequestView, source: WorkerView | None, weight: float, load_weight: float
) -> Callable[[WorkerView], float]:
    """TTFT of a worker by the best way, with the charges for copy and load: ``best_start`` without its objects.

    Prefill times are kept from one worker to the next while profile and prefix are the same, as they mostly are.
    """
    num_tokens, block_tokens, block_bytes = request.num_tokens, request.block_tokens, request.block_bytes
    in_store, most = request.store_hit_blocks, source.hit_blocks if source is not None else 0
    profile, known_match, own_s, peer_s, store_s = None, -1, 0.0, 0.0, 0.0

    def ttft_s(worker: WorkerView) -> float:
        nonlocal profile, known_match, own_s, peer_s, store_s
        wait_s, match = worker.wait_s, worker.match_blocks
        if worker.cost is not profile:
            profile, known_match = worker.cost, -1
            peer_s = profile.seconds(num_tokens, most * block_tokens) if most else 0.0
            store_s = profile.seconds(num_tokens, in_store * block_tokens) if in_store else 0.0
        if match != known_match:
            own_s, known_match = profile.seconds(num_tokens, match * block_tokens), match
        least_s, charge_s = wait_s + own_s, load_weight * own_s
        if most > match and worker.peer_bytes_per_s and source is not None:
            fetched_s = max(wait_s, peer_fetch_s(request, source, worker)) + peer_s
            if fetched_s < least_s:
                least_s, charge_s = fetched_s, weight * (own_s - peer_s) + load_weight * peer_s
        if in_store > match:
            fetch_s = (in_store - match) * block_bytes / (worker.store_bytes_per_s or ASSUMED_STORE_BYTES_PER_S)
            fetched_s = (fetch_s if fetch_s > wait_s else wait_s) + store_s
            if fetched_s < least_s:
                least_s, charge_s = fetched_s, load_weight * store_s
        return least_s + charge_s

    return ttft_s


class TtftMin:
    """Least estimated time to the first token, with charges for copies between workers and for the load it makes."""

    name = "ttft-min"
    ranks = True

    def __init__(self, replica_weight: float = 1.0, seed: int = 0, load_weight: float = 6.0) -> None:
        self._replica_weight = replica_weight
        self._load_weight = load_weight
        self._ties = Ties(seed)

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Decision | None:
        """The best pair; the decode worker is chosen once the prefill worker is known."""
        able = prefillers(workers)
        if not able:
            return None
        source = best_holder(able)
        idlest = min(able, key=_wait_s)
        bound_s = self._scores(request, [idlest], source)[0]
        scores = self._scores(request, able, source, bound_s)
        chosen = able[place_of_least(scores, self._ties.prefill)]

        def explain() -> list[Candidate]:
            scores = self._scores(request, able, source)
            return [self._candidate(request, w, source, s) for w, s in zip(able, scores, strict=True)]

        return decide(request, workers, chosen, self._ties, explain, best_start(request, chosen, source).fetch)

    def choose_decode(self, request: RequestView, workers: Sequence[WorkerView]) -> InstanceId | None:
        """The decode worker of least cost, none of which prefilled."""
        return best_decode(request, workers, self._ties)

    def _scores(
        self,
        request: RequestView,
        able: Sequence[WorkerView],
        source: WorkerView | None,
        bound_s: float = math.inf,
    ) -> list[float]:
        """The scores; infinity for those whose queue alone is longer than ``bound_s``, so that they cannot win."""
        ttft_s = _ttft(request, source, self._replica_weight, self._load_weight)
        num_blocks, scores = request.num_blocks, []
        for worker in able:
            if worker.wait_s > bound_s:
                scores.append(math.inf)
                continue
            score = ttft_s(worker)
            if worker.num_requests and worker.can_decode:
                score += worker.decode_step_s
            if worker.blocks_free < num_blocks - worker.hit_blocks:
                score += NO_ROOM_FINE_S
            scores.append(score)
        return scores

    def _copy_s(self, request: RequestView, worker: WorkerView, start: Start) -> float:
        if start.fetch is None:
            return 0.0
        return self._replica_weight * (own_start(request, worker).compute_s - start.compute_s)

    def _candidate(
        self, request: RequestView, worker: WorkerView, source: WorkerView | None, score: float
    ) -> Candidate:
        start = best_start(request, worker, source)
        terms = (
            ("queue_s", worker.wait_s),
            ("fetch_s", start.fetch_s),
            ("compute_s", start.compute_s),
            ("load_s", self._load_weight * start.compute_s),
            ("copy_s", self._copy_s(request, worker, start)),
            ("step_s", worker.decode_step_s if worker.can_decode and worker.num_requests else 0.0),
            ("no_room_s", 0.0 if worker.blocks_free >= request.num_blocks - worker.hit_blocks else NO_ROOM_FINE_S),
            ("hit_blocks", float(start.hit_blocks)),
        )
        return Candidate(worker.id, "prefill", score, terms)
