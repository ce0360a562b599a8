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

A worker that also decodes is examined as a whole, and so is each pair of one that prefills and one that decodes:

    score = max(queue, fetch) + prefill + seat + charges for load, copy, delay + least cost of decoding, here or moved

Running sequences lengthen its prefills (``slowdown``), and these disturb the sequences: ``delay`` is DELAY_WEIGHT times
the batch, for each second of the prefill that its answers will last, less the share that prompts disturb there anyway.
So prompts gather at some workers and answers at others (`decode`). The load is charged r / (1 - r) times if these
workers spend the share r of their time on prompts, up to the full charge: the time until a later request is reached
grows with it, and while they are idle a warm prefix is worth no wait. A copy, fetched or computed again, is charged in
proportion, but fully as far as it crowds the cache. Example: A runs 30 sequences and no prompts, its prefills take 1.2
times as long; B runs 5, spends half of its time on prompts and has 0.2 s of queue; a prefill takes 1 s, an answer 12 s.
With r = 0.25, A scores 1.2 + 0.33 + 0.2 * 30 * 1.2 = 8.7 s, B 0.2 + 1.03 + 0.33 + 0.2 * 5 * 1.03 / 6 = 1.7 s: B
computes the prompt, and its answer runs where that costs least, move included.
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
    decoders,
    place_of_least,
    prefillers,
)
from tanghulu.conductor.routing.policies.decode import (
    NO_ROOM_FINE_S,
    DecodesAtLeastCost,
    answer_cost_s,
    costs_before_move,
    decide,
    decode_cost_s,
    moving,
)
from tanghulu.conductor.routing.policies.fetching import (
    best_source,
    best_start,
    can_fetch,
    nearest_source,
    peer_fetch_s,
)

#: Weight of a second's delay of one running sequence by a prefill.
DELAY_WEIGHT = 0.2
#: And the share of an answer's time for which a running one is expected to last, so that no prefill delays it longer.
DELAYED_SHARE = 0.1
#: Share of time spent on prompts above which the charge for load is complete, at most.
_MOST_SHARE = 0.95
#: The lower bound of computing is reduced by this much, so that rounding never hides an equal score.
_SLACK = 1 - 1e-9


class _Scores:
    """Scores of one request's workers: ``best_start`` without its objects, plus the charges."""

    def __init__(
        self, request: RequestView, able: Ranked, workers: Sequence[WorkerView], weight: float, load_weight: float
    ) -> None:
        source = best_source(workers)
        self._request, self._source, self._weight, self._load_weight = request, source, weight, load_weight
        self._num_blocks, self._in_store = request.num_blocks, request.store_hit_blocks
        self._most = source.hit_blocks if source is not None else 0
        self._load_share, self._least_load_weight = 1.0, load_weight
        self._elsewhere: WorkerView | None = None
        if able.mixed:
            self._prepare_mixed(able, workers)

    def _prepare_mixed(self, able: Ranked, workers: Sequence[WorkerView]) -> None:
        """Set the charges of workers of both phases, and the best place for an answer that moves."""
        share = min(_MOST_SHARE, sum([able[place].prefill_share for place in able.mixed]) / len(able.mixed))
        full, self._least_load_weight = self._load_weight, min(self._load_weight, share / (1 - share))
        self._load_share = self._least_load_weight / full if full else 1.0
        takers = decoders(workers)
        if takers:
            costs = costs_before_move(self._request, takers)
            taker = takers[costs.index(min(costs))]
            self._elsewhere = None if taker.keeps_requests or taker.blocks_free < self._num_blocks else taker

    def of(self, worker: WorkerView) -> float:
        """Return the score of one worker."""
        request, mixed = self._request, worker.can_decode
        least_s, charge_s, _, compute_s, _ = self._start(worker, mixed)
        score = least_s + charge_s
        if mixed:
            score += self.delay_s(worker, compute_s) + self.decode_s(worker) + request.answer_tokens * worker.seat_s
        return score + NO_ROOM_FINE_S if worker.blocks_free < self._num_blocks - worker.hit_blocks else score

    def _start(self, worker: WorkerView, mixed: bool) -> tuple[float, float, int, float, float]:
        """Return the TTFT, the charges for load and copy, the blocks reused, and the times of computing and fetch."""
        request, match, wait_s = self._request, worker.match_blocks, worker.wait_s
        weight, load_weight = self._weight, self._load_weight
        own_s, slowdown, crowding = worker.prefill_s(request, match), 1.0, 0.0
        if mixed:
            slowdown, crowding = worker.slowdown, worker.crowding(self._num_blocks)
            own_s *= slowdown
            wait_s *= slowdown
            # What slows a prefill is charged as delay: the charges are for its computing alone.
            load_weight = self._least_load_weight / slowdown
            weight *= max(self._load_share, crowding) / slowdown
        least_s, charge_s, reused, compute_s, fetch_s = wait_s + own_s, load_weight * own_s, match, own_s, 0.0
        if mixed and self._most > match:
            charge_s += crowding * weight * (own_s - slowdown * worker.prefill_s(request, self._most))
        if self._most > match and worker.peer_bytes_per_s and self._source is not None:
            peer_s = slowdown * worker.prefill_s(request, self._most)
            moved_s = peer_fetch_s(request, self._source, worker)
            fetched_s = max(wait_s, moved_s) + peer_s
            if fetched_s < least_s:
                least_s, charge_s = fetched_s, weight * (own_s - peer_s) + load_weight * peer_s
                reused, compute_s, fetch_s = self._most, peer_s, moved_s
        if self._in_store > match:
            store_s = slowdown * worker.prefill_s(request, self._in_store)
            num_bytes = (self._in_store - match) * request.block_bytes
            moved_s = num_bytes / (worker.store_bytes_per_s or ASSUMED_STORE_BYTES_PER_S)
            fetched_s = max(wait_s, moved_s) + store_s
            if fetched_s < least_s:
                least_s, charge_s = fetched_s, load_weight * store_s
                reused, compute_s, fetch_s = self._in_store, store_s, moved_s
        return least_s, charge_s, reused, compute_s, fetch_s

    def delay_s(self, worker: WorkerView, compute_s: float) -> float:
        """Return the charge for the answers at ``worker`` that ``compute_s`` of prefill delay."""
        lasting_s = DELAYED_SHARE * self._request.answer_tokens * worker.gap_s
        return DELAY_WEIGHT * (1 - worker.disturbance) * worker.batch * min(compute_s, lasting_s)

    def decode_s(self, worker: WorkerView) -> float:
        """Return the least cost of decoding what ``worker`` prefills: in its seat there, or elsewhere."""
        own_s, elsewhere = answer_cost_s(self._request, worker), self._elsewhere
        if elsewhere is None or elsewhere is worker or worker.keeps_requests:
            return own_s
        return min(own_s, decode_cost_s(moving(self._request, worker), elsewhere, worker))

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
        return _SLACK * (1 + self._least_load_weight) * rest_tokens

    def candidate(self, worker: WorkerView) -> Candidate:
        """Return the judgement of one worker for people; its terms add up to the score, queue and fetch overlapping."""
        request, mixed = self._request, worker.can_decode
        _, charge_s, hit_blocks, compute_s, fetch_s = self._start(worker, mixed)
        load_s = (self._least_load_weight / worker.slowdown if mixed else self._load_weight) * compute_s
        terms = (
            ("queue_s", worker.slowdown * worker.wait_s),
            ("fetch_s", fetch_s),
            ("compute_s", compute_s),
            ("load_s", load_s),
            ("copy_s", charge_s - load_s),
            ("delay_s", self.delay_s(worker, compute_s) if mixed else 0.0),
            ("decode_s", self.decode_s(worker) if mixed else 0.0),
            ("seat_s", request.answer_tokens * worker.seat_s if mixed else 0.0),
            ("no_room_s", 0.0 if worker.blocks_free >= request.num_blocks - worker.hit_blocks else NO_ROOM_FINE_S),
            ("hit_blocks", float(hit_blocks)),
        )
        return Candidate(worker.id, "prefill", self.of(worker), terms)


class TtftMin(DecodesAtLeastCost):
    """Least estimated time to the first token, with charges for copies between workers and for the load it causes."""

    name = "ttft-min"

    def __init__(self, replica_weight: float = 1.0, seed: int = 0, load_weight: float = 6.0) -> None:
        self._replica_weight = replica_weight
        self._load_weight = load_weight
        super().__init__(seed)

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Decision | None:
        """Choose the best pair; the decode worker is chosen once the prefill worker is known."""
        able = prefillers(workers)
        if not able:
            return None
        scores = self._scores(request, able, workers)
        chosen = able[place_of_least(scores.that_could_win(able), self._ties.prefill)]

        def explain() -> list[Candidate]:
            return [scores.candidate(w) for w in able]

        nearest = nearest_source(request, workers, chosen)
        fetch = best_start(request, chosen, nearest).fetch if can_fetch(nearest, chosen) else None
        return decide(request, workers, chosen, self._ties, explain, fetch, move=True)

    def _scores(self, request: RequestView, able: Ranked, workers: Sequence[WorkerView]) -> _Scores:
        return _Scores(request, able, workers, self._replica_weight, self._load_weight)
