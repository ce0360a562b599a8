"""The default policy: the prefill worker with the least estimated TTFT, the decode worker where KV and room are.

    TTFT = max(queue, fetch) + prefill of the rest

with the longest prefix that is at the worker, is being computed there for an earlier request, or can be fetched from
the best other holder or from the store, where fetching pays. (After Mooncake, FAST'25, algorithm 1; there a fetch adds
to the queue, and blocks that are still being computed do not count.)

Example: 6400 tokens in blocks of 64, 2 MiB a block, 10 000 tokens/s. Worker A is idle and holds 20 blocks: (6400 -
1280) / 10 000 = 0.51 s. Worker B holds 90 but has 8000 tokens in its queue: 0.8 + 0.064 = 0.86 s. With all 100 blocks
in the store at 2 GB/s A fetches 80 blocks in 0.08 s and computes one token: 0.08 s. A wins.

A prefix fetched from another worker is held twice from then on, and the copy displaces some other prefix, which will
have to be recomputed when requested again. So a copy is charged the time it saves, times ``replica_weight``: with 1,
workers are ranked as if none could fetch, and the chosen one fetches where that pays. In replay near saturation this
avoids about 60 % of the copies and reduces the mean TTFT by a tenth (docs/design/0007). Fetches from the store are not
charged: the original stays there.

A computing worker delays all later requests, which have not arrived yet when the choice is made. So every second of
computing counts ``load_weight`` times in addition: a worker that has the prefix is worth a longer wait than the request
by itself would accept. With 0, a short queue elsewhere draws requests away from their reusable prefixes, caches fill
with copies, and near saturation every worker computes everything: without fetches, the conversation trace then has a
mean TTFT of 50 s, 17.7 s with 1, 8.6 s with 3, 3.6 s with 6 and 3.4 s with 12 (with fetches 2.70 s and 2.60 to 2.64 s).
Example: A is idle and would compute for 0.5 s, B has the prefix, 0.9 s of queue and 0.05 s of rest. By itself the
request would start sooner at A, 0.5 s against 0.95; with 6 the scores are 3.5 and 1.25, and it waits for B.

A worker that also decodes has a limited number of seats, and the sequences of a batch slow each other. So it is charged
the time its batch adds to the request's decoding and the request to the batch's, plus the wait for a seat if none is
free. This spreads a burst behind one cached prefix. Example: A holds the prefix and runs 20 sequences, each adding 1 ms
to a step: 2 * 64 * 20 * 1 ms = 2.6 s. B is idle and can fetch the prefix, a copy charged 2.4 s: B wins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tanghulu.conductor.routing.policies.base import (
    ASSUMED_STORE_BYTES_PER_S,
    Candidate,
    Decision,
    Ranked,
    RequestView,
    WorkerView,
    place_of_least,
    prefillers,
)
from tanghulu.conductor.routing.policies.decode import NO_ROOM_FINE_S, Ties, best_decode, decide
from tanghulu.conductor.routing.policies.fetching import (
    Start,
    best_source,
    best_start,
    can_fetch,
    nearest_source,
    own_start,
    peer_fetch_s,
)
from tanghulu.types import InstanceId

#: A batch slows a joining request, and the request slows each sequence of the batch by as much as one of them slows it.
BOTH_SIDES = 2
#: The lower bound of computing is reduced by this much, so that rounding never hides an equal score.
_SLACK = 1 - 1e-9


class _Scores:
    """Scores of one request's workers: ``best_start`` without its objects, plus copy, load, batch and room charges."""

    def __init__(self, request: RequestView, source: WorkerView | None, weight: float, load_weight: float) -> None:
        self._request, self._source, self._weight, self._load_weight = request, source, weight, load_weight
        self._num_blocks, self._in_store = request.num_blocks, request.store_hit_blocks
        self._most = source.hit_blocks if source is not None else 0
        self._batch_weight, self._answer_tokens = BOTH_SIDES * request.judged_share, request.answer_tokens

    def of(self, worker: WorkerView) -> float:
        """Return the score of one worker."""
        request, match, wait_s, load_weight = self._request, worker.match_blocks, worker.wait_s, self._load_weight
        own_s = worker.prefill_s(request, match)
        least_s, charge_s = wait_s + own_s, load_weight * own_s
        if self._most > match and worker.peer_bytes_per_s and self._source is not None:
            peer_s = worker.prefill_s(request, self._most)
            fetched_s = max(wait_s, peer_fetch_s(request, self._source, worker)) + peer_s
            if fetched_s < least_s:
                least_s, charge_s = fetched_s, self._weight * (own_s - peer_s) + load_weight * peer_s
        if self._in_store > match:
            store_s = worker.prefill_s(request, self._in_store)
            num_bytes = (self._in_store - match) * request.block_bytes
            fetched_s = max(wait_s, num_bytes / (worker.store_bytes_per_s or ASSUMED_STORE_BYTES_PER_S)) + store_s
            if fetched_s < least_s:
                least_s, charge_s = fetched_s, load_weight * store_s
        score = least_s + charge_s
        if worker.num_requests and worker.can_decode:
            score += self._batch_weight * worker.batch_s + self._answer_tokens * worker.seat_s
        return score + NO_ROOM_FINE_S if worker.blocks_free < self._num_blocks - worker.hit_blocks else score

    def that_could_win(self, able: Ranked) -> list[float]:
        """Return the scores; infinity for workers whose wait rules out the lowest score.

        The idlest worker is examined first, then holders, then all others. Each is scored only if its wait plus its
        minimum computing cost is below the lowest score so far; that minimum assumes, for a holder, the longest prefix
        that any worker has or could fetch, for any other the longest it could fetch, at the speed of the fastest.
        """
        waits, times = able.waits, able.token_times
        scores = [math.inf] * len(able)
        first = waits.index(min(waits))
        bound_s = scores[first] = self.of(able[first])
        held_s = self._least_compute_s(max(able.longest, self._most))
        for place in able.holders:
            if waits[place] + held_s * times[place] <= bound_s:
                scores[place] = score = self.of(able[place])
                if score < bound_s:
                    bound_s = score
        latest_s = bound_s - self._least_compute_s(self._most if able.may_fetch else 0) * min(times)
        for place in [at for at, wait_s in enumerate(waits) if wait_s <= latest_s]:
            scores[place] = self.of(able[place])
        return scores

    def _least_compute_s(self, hit_blocks: int) -> float:
        """Return a lower bound on computing and its charge, per second that a token takes, rounded down.

        ``hit_blocks`` of the prompt, or more if the store has more, need not be computed.
        """
        rest_tokens = self._request.rest_tokens(max(hit_blocks, self._in_store))
        return _SLACK * (1 + self._load_weight) * rest_tokens


class TtftMin:
    """Least estimated time to the first token, with charges for copies between workers and for the load it causes."""

    name = "ttft-min"
    ranks = True

    def __init__(self, replica_weight: float = 1.0, seed: int = 0, load_weight: float = 6.0) -> None:
        self._replica_weight = replica_weight
        self._load_weight = load_weight
        self._ties = Ties(seed)

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Decision | None:
        """Choose the best pair; the decode worker is chosen once the prefill worker is known."""
        able = prefillers(workers)
        if not able:
            return None
        source = best_source(workers)
        scores = self._scores(request, source)
        chosen = able[place_of_least(scores.that_could_win(able), self._ties.prefill)]

        def explain() -> list[Candidate]:
            return [self._candidate(request, w, source, scores.of(w)) for w in able]

        nearest = nearest_source(request, workers, chosen)
        fetch = best_start(request, chosen, nearest).fetch if can_fetch(nearest, chosen) else None
        return decide(request, workers, chosen, self._ties, explain, fetch)

    def choose_decode(self, request: RequestView, workers: Sequence[WorkerView]) -> InstanceId | None:
        return best_decode(request, workers, self._ties)

    def _scores(self, request: RequestView, source: WorkerView | None) -> _Scores:
        return _Scores(request, source, self._replica_weight, self._load_weight)

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
            ("batch_s", BOTH_SIDES * request.judged_share * worker.batch_s if worker.can_decode else 0.0),
            ("seat_s", request.answer_tokens * worker.seat_s if worker.can_decode else 0.0),
            ("no_room_s", 0.0 if worker.blocks_free >= request.num_blocks - worker.hit_blocks else NO_ROOM_FINE_S),
            ("hit_blocks", float(start.hit_blocks)),
        )
        return Candidate(worker.id, "prefill", score, terms)
