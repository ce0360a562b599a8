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
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from tanghulu.conductor.policies.base import Candidate, Decision, RequestView, WorkerView, prefillers
from tanghulu.conductor.policies.decode import NO_ROOM_FINE_S, best_decode, decide
from tanghulu.conductor.policies.fetching import Start, best_holder, own_start, starts
from tanghulu.types import InstanceId


class TtftMin:
    """Least estimated time to the first token, copies between workers charged by ``replica_weight``."""

    name = "ttft-min"
    ranks = True

    def __init__(self, replica_weight: float = 1.0, seed: int = 0) -> None:
        self._replica_weight = replica_weight
        self._ties = random.Random(seed)

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Decision | None:
        """The best pair; the decode worker is chosen once the prefill worker is known."""
        able = prefillers(workers)
        source = best_holder(able)
        ways = {w.id: min(starts(request, w, source), key=lambda start: start.ttft_s) for w in able}
        prefills = [self._candidate(request, w, ways[w.id]) for w in able]
        return decide(request, workers, prefills, self._ties, {id: way.fetch for id, way in ways.items()})

    def choose_decode(self, request: RequestView, workers: Sequence[WorkerView]) -> InstanceId | None:
        """The decode worker of least cost, none of which prefilled."""
        return best_decode(request, workers, self._ties)

    def _candidate(self, request: RequestView, worker: WorkerView, start: Start) -> Candidate:
        copy_s = 0.0
        if start.fetch is not None:
            copy_s = self._replica_weight * (own_start(request, worker).compute_s - start.compute_s)
        step_s = worker.decode_step_s if worker.can_decode and worker.num_requests else 0.0
        room_s = 0.0 if worker.blocks_free >= request.num_blocks - worker.hit_blocks else NO_ROOM_FINE_S
        terms = (
            ("queue_s", worker.wait_s),
            ("fetch_s", start.fetch_s),
            ("compute_s", start.compute_s),
            ("copy_s", copy_s),
            ("step_s", step_s),
            ("no_room_s", room_s),
            ("hit_blocks", float(start.hit_blocks)),
        )
        return Candidate(worker.id, "prefill", start.ttft_s + copy_s + step_s + room_s, terms)
