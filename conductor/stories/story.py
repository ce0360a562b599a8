"""One sequence's story: events and times go in, phases come out that add up to the time from end to end. Pure.

Only the conductor's clock provides times; workers report durations by their own clocks, so clocks of hosts need not
agree. The parts of a story lie end to end, from the request's header to the end of its answer: their sum is the whole
time by construction, and unmeasured time has names, too (``TRANSIT``, ``UNREPORTED``).

Example: a request is sent to a worker at 10.0, which reports with its first token, at 10.5, that it waited .1 s and
computed .3 s. These lie in the middle of the .5 s; the remaining .1 s is the way there and back. Tokens come until
11.0: .5 s of decoding. If a worker reports more time than has passed, its report is scaled down to that.

After a hand-over, the second worker's waiting and loading count as the hand-over, and its computing as decoding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, NamedTuple

from msgspec import structs

from tanghulu.conductor.stories.account import Audience, Explanation
from tanghulu.conductor.stories.origin import Origin
from tanghulu.session.outputs import PhaseTimes
from tanghulu.types import InstanceId


class Phase(Enum):
    """Phases of a request, in the order in which they usually occur."""

    RECEIVE = "its body comes in"
    TOKENISE = "the body is checked, and becomes a prompt and tokens; its model is waited for, if it has no worker yet"
    QUEUE = "it waits here for a place, or for a worker"
    ROUTE = "workers are chosen for it"
    TRANSIT = "between here and a worker: messages on their way, and event loops that are busy"
    WORKER_QUEUE = "it waits at a worker for its turn or for room"
    KV_LOAD = "a worker fetches KV from the store or from another worker's cache"
    PREFILL = "a worker computes its prompt, up to the first token"
    KV_STORE = "a worker gives blocks to the store: what the request waits for; most is done behind the computation"
    HAND_OVER = "a decode worker is chosen, has room, and pulls the KV"
    DECODE = "further tokens come"
    UNREPORTED = (
        "at a worker that did not say what it did: it was lost or refused the request, or the request was aborted"
    )
    DETOKENISE = "the last tokens become text"
    SEND = "the rest of the answer goes out; its other sequences, and a client that reads slowly, are waited for"

    __hash__ = object.__hash__  # Enum's own hash is a Python function, and each request looks up about fifty phases


class RequestStatus(Enum):
    """Outcomes of a request."""

    SERVED = "the client has all of it"
    ABORTED = "the client hung up, or asked for its end"
    REFUSED = "there was no room for it, or it asked for what cannot be"
    FAILED = "an error that is not the client's"

    __hash__ = object.__hash__


class VisitEnd(Enum):
    """Ways in which a request leaves a worker."""

    ENDED = "it ended there"
    HANDED_OVER = "it went on at a decode worker"
    LOST = "the worker was lost, or did not take it"


class StoryPart(NamedTuple):
    """A piece of a story's time; ``visit`` numbers the worker where it was spent, from 0, or is -1."""

    phase: Phase
    start_s: float
    end_s: float
    visit: int = -1


@dataclass(slots=True)
class Visit:
    """A request's time at one worker. ``reported`` arrived at ``reported_s``, its last tokens at ``last_s``."""

    worker: InstanceId
    sent_s: float
    is_handed_over: bool
    reported: PhaseTimes | None = None
    reported_s: float = 0.0
    first_s: float | None = None
    last_s: float = 0.0
    end_s: float | None = None
    how: VisitEnd | None = None


_P: Final = Phase
_PHASES: Final = (_P.WORKER_QUEUE, _P.KV_LOAD, _P.PREFILL, _P.KV_STORE, _P.DECODE)
_PHASES_HANDED_OVER: Final = (_P.HAND_OVER, _P.HAND_OVER, _P.DECODE, _P.KV_STORE, _P.DECODE)


class Story:
    """The story of one sequence; ``origin`` is None without an HTTP request."""

    __slots__ = (
        "_last_s",
        "_phase",
        "_was_taken",
        "began_s",
        "cached_tokens",
        "code",
        "explanation",
        "generated_tokens",
        "id",
        "model",
        "name",
        "origin",
        "parts",
        "prompt_tokens",
        "status",
        "visits",
    )

    def __init__(
        self, story_id: str, name: str, model: str, prompt_tokens: int, now_s: float, origin: Origin | None = None
    ) -> None:
        self.id = story_id
        self.name = name
        self.model = model
        self.origin = origin
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = self.generated_tokens = 0
        self.explanation: Explanation | None = None
        self.status: RequestStatus | None = None
        self.code = ""
        self.parts: list[StoryPart] = []
        self.visits: list[Visit] = []
        self.began_s = self._last_s = now_s if origin is None else min(origin.began_s, now_s)
        self._phase: Phase | None = _P.RECEIVE
        self._was_taken = False
        if origin is not None:
            self._turn(_P.TOKENISE, min(origin.received_s, now_s))
        self._turn(_P.QUEUE, now_s)

    def __repr__(self) -> str:
        return f"<Story {self.id} {self.status.name if self.status else 'under way'} {self.seconds():.3f} s>"

    # --- events

    def routed(self, began_s: float) -> None:
        """Record that workers were chosen, by work begun at ``began_s``."""
        self._turn(_P.ROUTE, began_s)

    def sent(self, worker: InstanceId, now_s: float) -> None:
        """Record that the request was sent to ``worker``."""
        handed_over = self._phase is _P.HAND_OVER
        self._turn(None, now_s)
        self.visits.append(Visit(worker, now_s, handed_over))

    def report(self, now_s: float, reported: PhaseTimes | None = None) -> None:
        """Record tokens from the worker, or its phase times for the request so far, or both."""
        visit = self.visits[-1]
        if visit.first_s is None:
            visit.first_s = now_s
        visit.last_s = now_s
        if reported is not None:
            visit.reported, visit.reported_s = reported, now_s

    def handed_over(self, now_s: float) -> None:
        self._leave(VisitEnd.HANDED_OVER, now_s)
        self._turn(_P.HAND_OVER, now_s)

    def lost(self, now_s: float) -> None:
        """Record that its worker was lost, or cannot continue it: it waits again."""
        self._leave(VisitEnd.LOST, now_s)
        self._turn(_P.QUEUE, now_s)

    def ended(self, status: RequestStatus, now_s: float, code: str = "") -> None:
        """Record the end of the sequence; ``code`` is that of the error, if any."""
        self._leave(VisitEnd.ENDED, now_s)
        self.status, self.code = status, code
        self._turn(_P.DETOKENISE if status is RequestStatus.SERVED else _P.SEND, now_s)

    def taken(self, now_s: float) -> None:
        """Record that the last of its text was built for the client."""
        self._was_taken = True
        if self._phase is _P.DETOKENISE:
            self._turn(_P.SEND, now_s)

    def over(self, now_s: float) -> None:
        """Record that the answer was sent, or its client has left; a request abandoned by its client was not served."""
        assert self.status is not None, "it has not ended"
        if self.status is RequestStatus.SERVED and not self._was_taken:
            self.status = RequestStatus.ABORTED
        self._turn(None, now_s)

    # --- queries

    @property
    def is_over(self) -> bool:
        return self._phase is None and self.status is not None

    def seconds(self, now_s: float = 0.0) -> float:
        """Return the time from its beginning to its end, or to ``now_s`` while in progress."""
        return max(self._last_s, now_s if not self.is_over else 0.0) - self.began_s

    def phases(self, now_s: float = 0.0) -> dict[Phase, float]:
        """Return seconds by phase, for the phases that occurred; up to ``now_s`` while in progress."""
        totals = _totals(self.parts)
        if not self.is_over and now_s > self._last_s:
            phase = self._phase or (_P.UNREPORTED if self.visits[-1].first_s is None else _P.DECODE)
            totals[phase] = totals.get(phase, 0.0) + now_s - self._last_s
        return totals

    def summary(self, now_s: float = 0.0, audience: Audience = Audience.CLIENT) -> dict[str, Any]:
        """Return the story for people and programs, without any text of the request but what ``audience`` may see."""
        origin = self.origin
        return {
            "id": self.id,
            "name": self.name,
            "x_request_id": origin.x_request_id if origin is not None else "",
            "traceparent": origin.trace.header if origin is not None else "",
            "model": self.model,
            "status": self.status.name.lower() if self.status is not None else "under_way",
            "error": self.code,
            "seconds": round(self.seconds(now_s), 6),
            "phases": {phase.name.lower(): round(seconds, 6) for phase, seconds in self.phases(now_s).items()},
            "workers": [self._shown(number, visit, now_s) for number, visit in enumerate(self.visits)],
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "generated_tokens": self.generated_tokens,
            **({"cache": self.explanation.shown(audience)} if self.explanation is not None else {}),
        }

    def _shown(self, number: int, visit: Visit, now_s: float) -> dict[str, Any]:
        here = _totals([part for part in self.parts if part.visit == number])
        until_s = visit.end_s if visit.end_s is not None else max(now_s, visit.sent_s)
        return {
            "worker": visit.worker,
            "left": visit.how.name.lower() if visit.how is not None else "under_way",
            "seconds": round(until_s - visit.sent_s, 6),
            "phases": {phase.name.lower(): round(seconds, 6) for phase, seconds in here.items()},
        }

    def check(self) -> None:
        at_s = self.began_s
        for part in self.parts:
            assert part.start_s == at_s, f"{self!r} has a gap before {part}"
            assert part.end_s > part.start_s
            at_s = part.end_s
        assert at_s == self._last_s
        is_visiting = bool(self.visits) and self.visits[-1].end_s is None
        assert (self._phase is None) == (self.is_over or is_visiting)
        assert all(visit.end_s is not None for visit in self.visits[:-1])

    # --- parts

    def _turn(self, phase: Phase | None, now_s: float) -> None:
        """End the current part, if any, and continue with ``phase``; None: at a worker, or not at all."""
        if self._phase is not None:
            self._add(self._phase, now_s)
        self._phase = phase

    def _add(self, phase: Phase, until_s: float, visit: int = -1) -> None:
        """Attribute the time since the last part, up to ``until_s``."""
        if until_s > self._last_s:
            self.parts.append(StoryPart(phase, self._last_s, until_s, visit))
            self._last_s = until_s

    def _leave(self, how: VisitEnd, now_s: float) -> None:
        """Attribute the time at a worker, if the request is at one."""
        if self._phase is not None:
            return
        visit, number = self.visits[-1], len(self.visits) - 1
        visit.end_s, visit.how = now_s, how
        if visit.reported is not None:
            self._place(visit, visit.reported, number)
        elif visit.first_s is not None:
            self._add(_P.DECODE if visit.is_handed_over else _P.PREFILL, visit.first_s, number)
        if how is VisitEnd.HANDED_OVER:
            self._add(_P.HAND_OVER, now_s, number)
        elif visit.first_s is not None:
            self._add(_P.DECODE, visit.last_s if how is VisitEnd.LOST else now_s, number)
        self._add(_P.UNREPORTED, now_s, number)

    def _place(self, visit: Visit, reported: PhaseTimes, number: int) -> None:
        """Put the worker's reported times in the middle of the time that had passed by then."""
        seconds = [s if 0 <= s < math.inf else 0.0 for s in structs.astuple(reported)]
        passed_s, reported_s = visit.reported_s - visit.sent_s, sum(seconds)
        scale = passed_s / reported_s if reported_s > passed_s else 1.0
        at_s = visit.sent_s + max(0.0, passed_s - reported_s) / 2
        self._add(_P.TRANSIT, at_s, number)
        for phase, length_s in zip(_PHASES_HANDED_OVER if visit.is_handed_over else _PHASES, seconds, strict=True):
            at_s += length_s * scale
            self._add(phase, min(at_s, visit.reported_s), number)
        self._add(_P.TRANSIT, visit.reported_s, number)


def _totals(parts: Iterable[StoryPart]) -> dict[Phase, float]:
    totals: dict[Phase, float] = {}
    for phase, start_s, end_s, _ in parts:
        totals[phase] = totals.get(phase, 0.0) + end_s - start_s
    return totals
