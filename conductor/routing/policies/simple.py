"""Policies that ignore the prompt: in turn, random, the less loaded of two, the least loaded. Baselines.

Session affinity, a modifier of any policy: a conversation stays where its last turn was prefilled.

It moves if the worker has left or its queue is longer than the shortest one by more than ``patience_s``. The memory is
bounded: beyond ``MAX_SESSIONS``, the sessions unused for longest are forgotten. Requests without a session name are
left to the inner policy.
"""

from __future__ import annotations

import copy
import operator
import random
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tanghulu.conductor.routing.policies.base import (
    Candidate,
    Decision,
    RequestView,
    RoutingPolicy,
    WorkerView,
    any_of_least,
    decoders,
    place_of_least,
    prefillers,
)
from tanghulu.conductor.routing.policies.decode import Ties
from tanghulu.types import InstanceId

_id = operator.attrgetter("id")


class _OneByOne(ABC):
    """A policy that chooses for each phase separately."""

    ranks = False

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Decision | None:
        prefill, decode = prefillers(workers), decoders(workers)
        if not prefill or not decode:
            return None
        first = self._prefill(prefill)
        # A worker that does both keeps its request: moving KV would gain nothing here.
        return Decision(first.id, first.id if first.can_decode else self._decode(decode).id)

    def choose_decode(self, request: RequestView, workers: Sequence[WorkerView]) -> InstanceId | None:
        able = decoders(workers)
        return self._decode(able).id if able else None

    @abstractmethod
    def _prefill(self, workers: Sequence[WorkerView]) -> WorkerView: ...

    @abstractmethod
    def _decode(self, workers: Sequence[WorkerView]) -> WorkerView: ...


class RoundRobin(_OneByOne):
    """Each worker in turn, by id; remembers the last one's id, so that arrivals and departures do no harm."""

    name = "round-robin"

    def __init__(self) -> None:
        self._last_prefill = InstanceId("")
        self._last_decode = InstanceId("")

    def _prefill(self, workers: Sequence[WorkerView]) -> WorkerView:
        chosen = _behind(self._last_prefill, workers)
        self._last_prefill = chosen.id
        return chosen

    def _decode(self, workers: Sequence[WorkerView]) -> WorkerView:
        chosen = _behind(self._last_decode, workers)
        self._last_decode = chosen.id
        return chosen


def _behind(last: InstanceId, workers: Sequence[WorkerView]) -> WorkerView:
    ordered = sorted(workers, key=_id)
    return next((w for w in ordered if w.id > last), ordered[0])


class Random(_OneByOne):
    """Any worker, drawn from a seeded generator: equal seeds and views give equal choices."""

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self._random = Ties(seed)

    def _prefill(self, workers: Sequence[WorkerView]) -> WorkerView:
        return self._random.prefill.choice(sorted(workers, key=_id))

    def _decode(self, workers: Sequence[WorkerView]) -> WorkerView:
        return self._random.decode.choice(sorted(workers, key=_id))


class PowerOfTwo(_OneByOne):
    """The less loaded of two workers drawn from a seeded generator: nearly balanced, and few are examined.

    (Mitzenmacher, "The power of two choices in randomized load balancing", 2001.)
    """

    name = "power-of-two"

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def _prefill(self, workers: Sequence[WorkerView]) -> WorkerView:
        return min(self._two(workers), key=lambda w: (w.wait_s, w.num_requests, w.id))

    def _decode(self, workers: Sequence[WorkerView]) -> WorkerView:
        return min(self._two(workers), key=lambda w: (w.num_requests, w.id))

    def _two(self, workers: Sequence[WorkerView]) -> list[WorkerView]:
        ordered = sorted(workers, key=_id)
        return self._random.sample(ordered, min(2, len(ordered)))


class LeastLoaded:
    """The worker with the shortest queue, and among equals the fewest requests; for decode, the fewest requests."""

    name = "least-loaded"
    ranks = True

    def __init__(self, seed: int = 0) -> None:
        self._ties = Ties(seed)

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Decision | None:
        able, deciders = prefillers(workers), decoders(workers)
        if not able or not deciders:
            return None
        waits = [(w.wait_s, w.num_requests) for w in able]
        prefill = able[place_of_least(waits, self._ties.prefill)]
        decode = prefill if prefill.can_decode else self._least_busy(deciders)

        def explain() -> tuple[Candidate, ...]:
            prefills = [Candidate(w.id, "prefill", w.wait_s, (("queue_s", w.wait_s),)) for w in able]
            return (*prefills, *map(_by_requests, deciders))

        return Decision(prefill.id, decode.id, explain=explain)

    def choose_decode(self, request: RequestView, workers: Sequence[WorkerView]) -> InstanceId | None:
        able = decoders(workers)
        return self._least_busy(able).id if able else None

    def _least_busy(self, able: Sequence[WorkerView]) -> WorkerView:
        return able[any_of_least([w.num_requests for w in able], self._ties.decode)]


def _by_requests(worker: WorkerView) -> Candidate:
    terms = (("num_requests", float(worker.num_requests)), ("blocks_free", float(worker.blocks_free)))
    return Candidate(worker.id, "decode", float(worker.num_requests), terms)


MAX_SESSIONS = 65_536


class SessionAffinity:
    """Remembers each session's worker; delegates everything else to ``inner``."""

    def __init__(self, inner: RoutingPolicy, patience_s: float = 2.0, max_sessions: int = MAX_SESSIONS) -> None:
        assert max_sessions > 0
        self.ranks = False
        self.name = f"{inner.name}+session-affinity"
        self._inner = inner
        self._patience_s = patience_s
        self._max_sessions = max_sessions
        self._homes: OrderedDict[str, InstanceId] = OrderedDict()

    def __deepcopy__(self, memo: dict[int, Any]) -> SessionAffinity:
        same = copy.copy(self)
        same._inner, same._homes = copy.deepcopy(self._inner, memo), self._homes.copy()  # its names never change
        return same

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Decision | None:
        """Choose the session's worker while available and not far behind; else remember the inner policy's choice."""
        home = self._home(request, prefillers(workers)) if request.session else None
        if home is not None:
            workers = [w for w in workers if w.id == home.id or not w.can_prefill or w.can_decode]
            workers = [w if w.id == home.id else _decode_only(w) for w in workers]
        decision = self._inner.choose(request, workers)
        if decision is not None and request.session:
            self._remember(request.session, decision.prefill)
        return decision

    def choose_decode(self, request: RequestView, workers: Sequence[WorkerView]) -> InstanceId | None:
        return self._inner.choose_decode(request, workers)

    def check(self) -> None:
        assert len(self._homes) <= self._max_sessions

    def _home(self, request: RequestView, able: Sequence[WorkerView]) -> WorkerView | None:
        home = next((w for w in able if w.id == self._homes.get(request.session)), None)
        if home is None or home.wait_s > min([w.wait_s for w in able]) + self._patience_s:
            return None
        return home

    def _remember(self, session: str, worker: InstanceId) -> None:
        self._homes[session] = worker
        self._homes.move_to_end(session)
        if len(self._homes) > self._max_sessions:
            self._homes.popitem(last=False)


def _decode_only(worker: WorkerView) -> WorkerView:
    return replace(worker, can_prefill=False)
