"""The choice of the decode worker, shared by all policies that consider KV; and both phases in one decision.

The cost is the transfer of the KV that a worker lacks, as far as it outlasts the prefill (`base.hand_over_s`), plus the
time each running sequence adds to the steps of this answer (as far as its length is known), plus the wait for a seat if
none is free, plus a penalty if its free blocks do not suffice. The worker that prefills moves nothing. A worker that
also prefills pays for the copy in its cache as well: it displaces some other prefix, which will have to be recomputed
when requested again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from msgspec import structs

from tanghulu.conductor.routing.policies.base import (
    ASSUMED_STORE_BYTES_PER_S,
    Candidate,
    Decision,
    PeerFetch,
    Ranked,
    RequestView,
    WorkerView,
    any_of_least,
    decoders,
    hand_over_s,
    hidden_s,
)
from tanghulu.types import InstanceId

#: Assumed cost, in seconds, of waiting or preemption for lack of blocks.
NO_ROOM_FINE_S = 1000.0
#: A bound is raised by this much, so that rounding never hides an equal cost.
_SLACK = 1 + 1e-9


class Ties:
    """Two seeded generators, so that draws for one phase do not shift those for the other."""

    def __init__(self, seed: int) -> None:
        self.prefill = random.Random(seed)
        self.decode = random.Random(f"decode {seed}")


def decide(
    request: RequestView,
    workers: Sequence[WorkerView],
    prefill: WorkerView,
    ties: Ties,
    explain: Callable[[], Sequence[Candidate]],
    fetch: PeerFetch | None = None,
) -> Decision | None:
    """Decide on ``prefill`` and the best decode worker for it; None if no worker decodes.

    ``explain`` builds the candidates for prefill.
    """
    able = decoders(workers)
    if not able:
        return None
    request = moving(request, prefill, fetch)
    decode = able[place_of_least_cost(request, able, prefill.id, ties)]
    return Decision(
        prefill.id,
        decode.id,
        fetch,
        lambda: (*explain(), *decode_candidates(request, able, prefill.id)),
    )


def moving(request: RequestView, prefill: WorkerView, fetch: PeerFetch | None = None) -> RequestView:
    """Return the request as seen by decode workers if ``prefill`` computes it after its own blocks and ``fetch``."""
    hit_blocks = max(prefill.match_blocks, request.store_hit_blocks, fetch.num_blocks if fetch is not None else 0)
    behind_s = hidden_s(prefill.prefill_s(request, hit_blocks), request.rest_tokens(hit_blocks))
    kv_place = prefill.place if request.links is not None else None
    return structs.replace(request, kv_place=kv_place, hidden_s=behind_s)


def decode_costs(request: RequestView, able: Sequence[WorkerView], prefill: InstanceId | None) -> list[float]:
    """Return the cost of each of ``able``; ``prefill`` names the one that will have the KV, if any of them."""
    num_blocks, judged, answer_tokens = request.num_blocks, request.judged_share, request.answer_tokens
    costs = []
    for worker in able:
        needed = num_blocks - worker.hit_blocks
        cost_s = judged * worker.batch_s + answer_tokens * worker.seat_s
        if needed > 0:
            if worker.id != prefill:
                cost_s += _move_s(request, needed, _move_bytes_per_s(request, worker))
                cost_s += _copy_s(request, worker)
            if worker.blocks_free < needed:
                cost_s += NO_ROOM_FINE_S
        costs.append(cost_s)
    return costs


def place_of_least_cost(request: RequestView, able: Ranked, prefill: InstanceId | None, ties: Ties) -> int:
    """Return the place in ``able`` of the lowest of ``decode_costs``, or of any of the lowest."""
    near = near_places(request, able, prefill)
    return near[any_of_least(decode_costs(request, [able[at] for at in near], prefill), ties.decode)]


def near_places(request: RequestView, able: Ranked, prefill: InstanceId | None) -> list[int]:
    """Return the places, ascending, of all that could cost least; out of 64 that is a handful.

    These are the workers that hold some of the prompt or have prefilled it, and of the others, which have to move all
    of it, those that with the fastest link would cost no more than the worker with the smallest batch.
    """
    batch_times, judged = able.batch_times, request.judged_share
    least = batch_times.index(min(batch_times))
    bound_s = _SLACK * decode_costs(request, [able[least]], prefill)[0]
    if request.links is None:
        bound_s -= _move_s(request, request.num_blocks, able.fastest) / _SLACK
    least_s = bound_s / judged
    near = {at for at, batch_s in enumerate(batch_times) if batch_s <= least_s}
    near.update(able.holders, (least,))
    if prefill in able.place_of:
        near.add(able.place_of[prefill])
    return sorted(near)


def _move_s(request: RequestView, num_blocks: int, bytes_per_s: float) -> float:
    """Return the seconds by which moving ``num_blocks`` of the request outlasts its prefill."""
    block_tokens = request.block_tokens
    token_s = request.block_bytes / block_tokens / bytes_per_s
    return hand_over_s(num_blocks * block_tokens, token_s, request.hidden_s)


def _move_bytes_per_s(request: RequestView, worker: WorkerView) -> float:
    """Return the speed from the KV's place: as measured between the places, else the worker's general load speed."""
    measured = request.link_bytes_per_s(request.kv_place, worker.place)
    return measured or worker.store_bytes_per_s or ASSUMED_STORE_BYTES_PER_S


def _copy_s(request: RequestView, worker: WorkerView) -> float:
    """Return the cost of displacing cached blocks at a worker that also prefills: the computing they saved."""
    return worker.prefill_s(request, worker.hit_blocks) if worker.can_prefill else 0.0


def best_decode(request: RequestView, workers: Sequence[WorkerView], ties: Ties) -> InstanceId | None:
    """Return the decode worker of least cost, none of which prefilled; None if there is none."""
    able = decoders(workers)
    return able[place_of_least_cost(request, able, None, ties)].id if able else None


def decode_candidates(request: RequestView, able: Sequence[WorkerView], prefill: InstanceId | None) -> list[Candidate]:
    """Return ``decode_costs`` for people."""
    costs = decode_costs(request, able, prefill)
    return [_candidate(request, w, w.id == prefill, cost_s) for w, cost_s in zip(able, costs, strict=True)]


def _candidate(request: RequestView, worker: WorkerView, prefilled_here: bool, cost_s: float) -> Candidate:
    needed = max(0, request.num_blocks - worker.hit_blocks)
    missing = 0 if prefilled_here else needed
    move_s = _move_s(request, missing, _move_bytes_per_s(request, worker))
    batch_s = request.judged_share * worker.batch_s
    room_s = 0.0 if worker.blocks_free >= needed else NO_ROOM_FINE_S
    copy_s = _copy_s(request, worker) if missing else 0.0
    seat_s = request.answer_tokens * worker.seat_s
    terms = (("move_s", move_s), ("copy_s", copy_s), ("batch_s", batch_s), ("seat_s", seat_s), ("no_room_s", room_s))
    return Candidate(worker.id, "decode", cost_s, terms)
