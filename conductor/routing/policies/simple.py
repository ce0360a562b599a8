"""Policies that do not look at the prompt: in turn, at random, of two the less loaded, the least loaded. Baselines."""

from __future__ import annotations

import operator
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence

from tanghulu.conductor.routing.policies.base import (
    Candidate,
    Decision,
    RequestView,
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
    """A policy that picks for each phase by itself."""

    ranks = False

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Decision | None:
        prefill, decode = prefillers(workers), decoders(workers)
        if not prefill or not decode:
            return None
        first = self._prefill(prefill)
        # A worker that does both keeps its request: moving KV would buy nothing here.
        return Decision(first.id, first.id if first.can_decode else self._decode(decode).id)

    def choose_decode(self, request: RequestView, workers: Sequence[WorkerView]) -> InstanceId | None:
        able = decoders(workers)
        return self._decode(able).id if able else None

    @abstractmethod
    def _prefill(self, workers: Sequence[WorkerView]) -> WorkerView: ...

    @abstractmethod
    def _decode(self, workers: Sequence[WorkerView]) -> WorkerView: ...


class RoundRobin(_OneByOne):
    """Each worker in turn, by id; remembers the last one's id, so that comings and goings do no harm."""

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
    """Of two workers drawn from a seeded generator the less loaded one: nearly balanced, and few are looked at.

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
    """The worker with the shortest queue, of equal ones with the fewest requests; the fewest requests (decode)."""

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
