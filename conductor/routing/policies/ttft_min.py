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
takes a tenth off the mean TTFT (docs/design/0007). What comes from the store is charged nothing: it stays there.

A worker that computes keeps everybody waiting who comes behind, and nobody has come yet when the choice is made. So
every second of computing counts ``load_weight`` times more than once: a worker that has the prefix is worth waiting for
longer than the one request alone would wait. With 0 a short queue elsewhere draws requests away from what they could
reuse, caches fill with copies, and near saturation all compute everything: without fetches the conversation trace has a
mean TTFT of 50 s so, of 17.7 s with 1, 8.6 s with 3, 3.6 s with 6 and 3.4 s with 12 (with fetches 2.70 s and 2.60 to
2.64 s). Example: A is idle and would compute for 0.5 s, B has the prefix, 0.9 s of queue and 0.05 s of rest. Alone the
request starts sooner at A, 0.5 s against 0.95; with 6 the scores are 3.5 and 1.25, and it waits for B.

A worker that decodes too has a limited number of seats, and the sequences of a batch slow each other. So it is charged
what its batch adds to the request's decoding and the request to the batch's, and the wait for a seat if none is free.
This spreads a burst behind one cached prefix. Example: A holds the prefix and runs 20 sequences, each adding 1 ms to a
step: 2 * 64 * 20 * 1 ms = 2.6 s. B is idle and can fetch the prefix, a copy charged 2.4 s: B it is.
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

#: A batch slows a request that joins it, and the request slows each of the batch by as much as one of them slows it.
BOTH_SIDES = 2
#: The floor of computing is this much lower than it could be, so that rounding never hides an equal score.
_SLACK = 1 - 1e-9


class _Scores:
    """Scores of one request's workers: ``best_start`` without its objects, with the charges for copy, load, batch and
    room.
    """

    def __init__(self, request: RequestView, source: WorkerView | None, weight: float, load_weight: float) -> None:
        self._request, self._source, self._weight, self._load_weight = request, source, weight, load_weight
        self._num_blocks, self._in_store = request.num_blocks, request.store_hit_blocks
        self._most = source.hit_blocks if source is not None else 0
        self._batch_weight, self._answer_tokens = BOTH_SIDES * request.judged_share, request.answer_tokens

    def of(self, worker: WorkerView) -> float:
        """The score of one worker."""
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
        """The scores; infinity for workers that wait so long that they cannot have the least.

        The idlest worker is looked at first, then holders, then any other. Of them all only those that wait less than
        the least score so far by what computing costs them at least: a holder with the longest prefix that anybody has
        or could fetch, any other one with the longest that it could fetch, at the speed of the fastest.
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
        """A lower bound on computing and its charge, for each second that a token takes, rounded down.

        ``hit_blocks`` of the prompt, or more if the store has more, need not be computed.
        """
        rest_tokens = self._request.rest_tokens(max(hit_blocks, self._in_store))
        return _SLACK * (1 + self._load_weight) * rest_tokens


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
