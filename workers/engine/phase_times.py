"""Time of each request by phase in the engine: events and times go in, seconds come out. Pure.

    WAITING --fetch--> FETCHING --fetched--> PREFILLING --first token--> DECODING
       |  ^--preempted (from PREFILLING, DECODING)         ^
       '-------------------admitted------------------------'

Time spent handing blocks to the store is subtracted from the phase in which it fell. A preempted request waits, loads
and prefills again: each adds to the earlier time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum

from tanghulu.session.outputs import PhaseTimes
from tanghulu.types import RequestId
from tanghulu.workers.engine.step import CommittedBlock, StepPlan


class _At(IntEnum):
    """Phase of a request; numbers of ``_Times.seconds``, in the order of `PhaseTimes`."""

    WAITING = 0
    FETCHING = 1
    PREFILLING = 2
    STORING = 3
    DECODING = 4


class _Times:
    __slots__ = ("at", "seconds", "since_s")

    def __init__(self, now_s: float) -> None:
        self.at = _At.WAITING
        self.since_s = now_s
        self.seconds = [0.0] * len(_At)

    def turn(self, at: _At, now_s: float) -> None:
        self.seconds[self.at] += max(0.0, now_s - self.since_s)
        self.at, self.since_s = at, now_s


class PhaseBook:
    """Times of all requests of an engine."""

    def __init__(self) -> None:
        self._times: dict[RequestId, _Times] = {}
        self._waiting: set[RequestId] = set()

    def added(self, request_id: RequestId, now_s: float) -> None:
        self._times[request_id] = _Times(now_s)
        self._waiting.add(request_id)

    def planned(self, plan: StepPlan, now_s: float) -> None:
        """Note which requests are preempted, which are admitted, and for which something is fetched first."""
        for request_id in plan.preempted:
            self._turn(request_id, _At.WAITING, now_s)
            self._waiting.add(request_id)
        for wanted in plan.fetches:
            self._turn(wanted.request_id, _At.FETCHING, now_s)
            self._waiting.discard(wanted.request_id)
        if self._waiting:
            for request_id in self._waiting & {run.request.request_id for run in plan.runs}:
                self._turn(request_id, _At.PREFILLING, now_s)
                self._waiting.discard(request_id)

    def fetched(self, request_id: RequestId, now_s: float) -> None:
        self._turn(request_id, _At.PREFILLING, now_s)

    def stored(self, blocks: Sequence[CommittedBlock], seconds: float) -> None:
        """Count ``seconds`` spent handing ``blocks`` to the store, for their requests."""
        for request_id in {block.request_id for block in blocks}:
            if (times := self._times.get(request_id)) is not None:
                times.seconds[_At.STORING] += seconds
                times.since_s += seconds

    def token(self, request_id: RequestId, is_last: bool, now_s: float) -> PhaseTimes | None:
        """Record a new token of the request: the first one, and the last one, close the phase until then."""
        times = self._times.get(request_id)
        if times is None or (times.at is _At.DECODING and not is_last):
            return None
        times.turn(_At.DECODING, now_s)
        if is_last:
            del self._times[request_id]
        return PhaseTimes(*times.seconds)

    def dropped(self, request_id: RequestId) -> None:
        self._times.pop(request_id, None)
        self._waiting.discard(request_id)

    def check(self, live: Iterable[RequestId]) -> None:
        assert self._times.keys() <= set(live), "times of requests that are gone"
        assert self._waiting <= self._times.keys()

    def _turn(self, request_id: RequestId, at: _At, now_s: float) -> None:
        if (times := self._times.get(request_id)) is not None:
            times.turn(at, now_s)
