"""The choice of the decode worker, shared by all policies that consider KV; and both phases in one decision.

For a worker that only decodes, the cost is the transfer of the KV that it lacks, as far as it outlasts the prefill
(`base.hand_over_s`), plus the time each running sequence adds to the steps of this answer (as far as its length is
known), plus the wait for a seat if none is free, plus a penalty if its free blocks do not suffice. The worker that
prefills moves nothing.

For a worker that also prefills, the time of the whole answer counts, with the prompts that disturb it, and the time
that it adds to each sequence there: DECODE_WEIGHT * answer tokens * (gap + batch * slowing). So answers gather where
few prompts are computed, and prompts where few answers run (`ttft_min`): workers share out the phases by themselves, as
far as the load requires. Example, per token: A decodes 40 sequences in 33 ms and spends half of its time on prompts,
5/6 of 49 ms more: a gap of 74 ms. B decodes 60 in 40 ms and computes no prompts: B.

An answer prefilled elsewhere stalls once, while its KV moves and until the next step there, which counts MOVE_WEIGHT
times; and its copy displaces cached blocks while it runs: it is charged the computing that these saved, COPY_WEIGHT
times, as far as it crowds the cache.
"""

from __future__ import annotations

import math
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
#: Weight of a second of decoding against a second of waiting for the first token.
DECODE_WEIGHT = 0.1
#: And of a second between the first token and the second one, while KV moves: the client notices it as a stall.
MOVE_WEIGHT = 3.0
#: And of a second of computing that displaced blocks saved: it delays later requests, too (as load in `ttft_min`).
COPY_WEIGHT = 7.0
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
    *,
    move: bool = False,
) -> Decision | None:
    """Decide on ``prefill`` and the best decode worker for it; None if no worker decodes.

    A worker of both phases decodes what it prefills, unless answers ``move``. ``explain`` builds the candidates for
    prefill.
    """
    able = decoders(workers)
    if not able:
        return None
    if prefill.can_decode and not move:
        able = Ranked([prefill])
    request = moving(request, prefill, fetch)
    decode = able[place_of_least_cost(request, able, prefill, ties)]
    return Decision(
        prefill.id,
        decode.id,
        fetch,
        lambda: (*explain(), *decode_candidates(request, able, prefill)),
    )


def moving(request: RequestView, prefill: WorkerView, fetch: PeerFetch | None = None) -> RequestView:
    """Return the request as seen by decode workers if ``prefill`` computes it after its own blocks and ``fetch``."""
    hit_blocks = max(prefill.match_blocks, request.store_hit_blocks, fetch.num_blocks if fetch is not None else 0)
    behind_s = hidden_s(prefill.prefill_s(request, hit_blocks), request.rest_tokens(hit_blocks))
    kv_place = prefill.place if request.links is not None else None
    return structs.replace(request, kv_place=kv_place, hidden_s=behind_s)


def decode_costs(request: RequestView, able: Sequence[WorkerView], prefill: WorkerView | None) -> list[float]:
    """Return the cost of each of ``able``; ``prefill`` is the one that will have the KV, if any worker will."""
    return [decode_cost_s(request, worker, prefill) for worker in able]


def decode_cost_s(request: RequestView, worker: WorkerView, prefill: WorkerView | None) -> float:
    """Return the cost of decoding at ``worker`` if ``prefill`` has the KV; infinity if the KV cannot move there."""
    stays = prefill is not None and worker.id == prefill.id
    if not stays and (worker.keeps_requests or (prefill is not None and prefill.keeps_requests)):
        return math.inf
    needed = request.num_blocks - worker.hit_blocks
    cost_s = answer_cost_s(request, worker) + request.answer_tokens * worker.seat_s
    if needed > 0:
        if not stays:
            cost_s += _move_cost_s(request, worker, needed)
        if worker.blocks_free < needed:
            cost_s += NO_ROOM_FINE_S
    return cost_s


def answer_cost_s(request: RequestView, worker: WorkerView) -> float:
    """Return the cost of the answer at ``worker`` once it has a seat, with its cost to the others there."""
    if not worker.can_prefill:
        return request.judged_share * worker.batch_s
    return DECODE_WEIGHT * request.decoded_tokens * (worker.answer_s + request.num_tokens * worker.answer_context_s)


def costs_before_move(request: RequestView, able: Sequence[WorkerView]) -> list[float]:
    """Return the cost of an answer prefilled elsewhere at each of ``able``, without its move.

    All workers are examined for every request, so `answer_cost_s` is written out.
    """
    num_tokens, judged = request.num_tokens, request.judged_share
    weight, answer_tokens = DECODE_WEIGHT * request.decoded_tokens, request.answer_tokens
    return [
        math.inf
        if w.keeps_requests
        else (weight * (w.answer_s + num_tokens * w.answer_context_s) if w.can_prefill else judged * w.batch_s)
        + answer_tokens * w.seat_s
        for w in able
    ]


def _move_cost_s(request: RequestView, worker: WorkerView, num_blocks: int) -> float:
    """Return the cost of moving ``num_blocks`` to ``worker``, and of the cached blocks that they displace there.

    On average half a step passes until the answer joins.
    """
    move_s = _move_s(request, num_blocks, _move_bytes_per_s(request, worker))
    if not worker.can_prefill:
        return move_s
    displaced_s = worker.crowding(num_blocks) * worker.prefill_s(request, worker.hit_blocks)
    return MOVE_WEIGHT * (move_s + worker.gap_s / 2) + COPY_WEIGHT * displaced_s


def place_of_least_cost(request: RequestView, able: Ranked, prefill: WorkerView | None, ties: Ties) -> int:
    """Return the place in ``able`` of the lowest of ``decode_costs``, or of any of the lowest."""
    near = near_places(request, able, prefill)
    return near[any_of_least(decode_costs(request, [able[at] for at in near], prefill), ties.decode)]


def near_places(request: RequestView, able: Ranked, prefill: WorkerView | None) -> Sequence[int]:
    """Return the places, ascending, of all that could cost least; out of 64 that is a handful.

    These are the workers that hold some of the prompt or have prefilled it, and of the others, which have to move all
    of it, those that with the fastest link would cost no more than the cheapest one or the one that prefilled.
    """
    costs = costs_before_move(request, able)
    least = costs.index(min(costs))
    near = {least, *able.holders}
    bound_s = decode_cost_s(request, able[least], prefill)
    if prefill is not None and prefill.id in able.place_of:
        near.add(able.place_of[prefill.id])
        bound_s = min(bound_s, decode_cost_s(request, prefill, prefill))
    bound_s *= _SLACK
    if request.links is None:
        weight = MOVE_WEIGHT if len(able.mixed) == len(able) else 1.0
        bound_s -= weight * _move_s(request, request.num_blocks, able.fastest) / _SLACK
    near.update(at for at, cost_s in enumerate(costs) if cost_s <= bound_s)
    return sorted(near)


def _move_s(request: RequestView, num_blocks: int, bytes_per_s: float) -> float:
    """Return the seconds by which moving ``num_blocks`` of the request outlasts its prefill."""
    block_tokens = request.block_tokens
    token_s = request.block_bytes / block_tokens / bytes_per_s
    return hand_over_s(num_blocks * block_tokens, token_s, request.hidden_s)


def _move_bytes_per_s(request: RequestView, worker: WorkerView) -> float:
    """Return the speed from the KV's place: as measured between the places, else the worker's general load speed."""
    measured = request.link_bytes_per_s(request.kv_place, worker.place)
    general = (worker.can_prefill and worker.peer_bytes_per_s) or worker.store_bytes_per_s
    return measured or general or ASSUMED_STORE_BYTES_PER_S


class DecodesAtLeastCost:
    """A policy that chooses the decode worker by its cost, as above; ``seed`` decides between equals."""

    ranks = True

    def __init__(self, seed: int) -> None:
        self._ties = Ties(seed)

    def choose_decode(self, request: RequestView, workers: Sequence[WorkerView]) -> InstanceId | None:
        able = decoders(workers)
        return able[place_of_least_cost(request, able, None, self._ties)].id if able else None


def decode_candidates(request: RequestView, able: Sequence[WorkerView], prefill: WorkerView | None) -> list[Candidate]:
    """Return ``decode_costs`` for people, of the workers to which the KV can move."""
    costs = decode_costs(request, able, prefill)
    return [_candidate(request, w, prefill, cost) for w, cost in zip(able, costs, strict=True) if cost < math.inf]


def _candidate(request: RequestView, worker: WorkerView, prefill: WorkerView | None, cost_s: float) -> Candidate:
    needed = max(0, request.num_blocks - worker.hit_blocks)
    stays = needed == 0 or (prefill is not None and worker.id == prefill.id)
    terms = (
        ("move_s", 0.0 if stays else _move_cost_s(request, worker, needed)),
        ("batch_s", answer_cost_s(request, worker)),
        ("seat_s", request.answer_tokens * worker.seat_s),
        ("no_room_s", 0.0 if worker.blocks_free >= needed else NO_ROOM_FINE_S),
    )
    return Candidate(worker.id, "decode", cost_s, terms)
