"""Which worker decodes: the rule that all policies share which look at KV at all.

The cost is moving the KV that a worker lacks, plus what every running sequence adds to everybody's step, plus a fine
where its free blocks do not suffice. The worker that prefills moves nothing.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from tanghulu.conductor.policies.base import (
    ASSUMED_STORE_BYTES_PER_S,
    Candidate,
    Decision,
    PeerFetch,
    RequestView,
    WorkerView,
    best,
    decoders,
)
from tanghulu.types import InstanceId

ASSUMED_DECODE_STEP_S = 0.02
#: A sequence more in a batch slows its step by this share (attention and sampling; weights are read once anyway).
STEP_SHARE_OF_A_SEQUENCE = 1 / 16
#: A decode choice is judged over so many coming tokens.
JUDGED_TOKENS = 64
#: Seconds: what waiting or preemption for lack of blocks is taken to cost.
NO_ROOM_FINE_S = 1000.0
_NO_FETCHES: Mapping[InstanceId, PeerFetch | None] = {}


def decide(
    request: RequestView,
    workers: Sequence[WorkerView],
    prefills: Sequence[Candidate],
    ties: random.Random,
    fetches: Mapping[InstanceId, PeerFetch | None] = _NO_FETCHES,
) -> Decision | None:
    """The best of ``prefills``, and the best decode worker once that is known; None if one of them is missing."""
    prefill = best(prefills, ties)
    if prefill is None:
        return None
    decodes = decode_candidates(request, workers, prefill.worker)
    decode = best(decodes, ties)
    if decode is None:
        return None
    return Decision(prefill.worker, decode.worker, (*prefills, *decodes), fetches.get(prefill.worker))


def decode_candidates(
    request: RequestView, workers: Sequence[WorkerView], prefill: InstanceId | None
) -> list[Candidate]:
    """Every worker that may decode, with its cost; ``prefill`` names the one that will have the KV, if any of them."""
    return [_candidate(request, w, w.id == prefill) for w in decoders(workers)]


def best_decode(request: RequestView, workers: Sequence[WorkerView], ties: random.Random) -> InstanceId | None:
    """The decode worker of least cost, none of which prefilled; None if there is none."""
    choice = best(decode_candidates(request, workers, None), ties)
    return choice.worker if choice else None


def _candidate(request: RequestView, worker: WorkerView, prefilled_here: bool) -> Candidate:
    needed = max(0, request.num_blocks - worker.hit_blocks)
    missing = 0 if prefilled_here else needed
    move_s = missing * request.block_bytes / (worker.store_bytes_per_s or ASSUMED_STORE_BYTES_PER_S)
    step_s = worker.decode_step_s or ASSUMED_DECODE_STEP_S
    company_s = JUDGED_TOKENS * step_s * STEP_SHARE_OF_A_SEQUENCE * worker.num_requests
    room_s = 0.0 if worker.blocks_free >= needed else NO_ROOM_FINE_S
    terms = (("move_s", move_s), ("company_s", company_s), ("no_room_s", room_s))
    return Candidate(worker.id, "decode", move_s + company_s + room_s, terms)
