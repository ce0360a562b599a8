"""How long the conductor waits: for what comes next of a request, and for the next step of a worker. Pure.

**A request** has deadlines for the whole, for its first token and for each further one; it keeps them when it moves.
Example: 60 s for the whole, 10 s for the first token, 5 s between tokens. A request that arrives at 0 must have a token
at 10; it comes at 7, so the next is due at 12; and at 60 it ends, whatever has come.

**A worker** may keep its connections and answer calls while its engine stands still, as in a call to a GPU that never
returns. One with work that sends no step for ``limit_s`` counts as lost. One that promises a step at least every
``beat_s``, with or without work, is judged while it is idle too. It is looked at LOOKS times in ``limit_s``; a look
that comes late means that the looking process itself stood still, so that time does not count. Example: a limit of
10 s, looks every 2.5 s; the conductor is stopped for 30 s, and at its first look after that a worker that sent a step
1 s before has been silent for 3.5 s, not for 31.
"""

from __future__ import annotations

import math
from typing import Final

from tanghulu.conductor.routing.requests import Timeouts


class Deadlines:
    """The deadlines of one request."""

    def __init__(self, timeouts: Timeouts, arrived_s: float) -> None:
        self._timeouts = timeouts
        self._arrived_s = arrived_s
        self._last_s: float | None = None

    def came(self, now_s: float) -> None:
        """Note that tokens came."""
        self._last_s = now_s

    @property
    def due_s(self) -> float:
        """The time at which the next deadline is missed, unless tokens come; infinite where there is none."""
        return min(self._whole_due_s, self._token_due_s)

    def missed(self, now_s: float) -> str:
        """The deadline that is missed, for people; "" if none is."""
        if now_s >= self._whole_due_s:
            return f"the request did not end within {self._timeouts.request_s:g} s"
        if now_s < self._token_due_s:
            return ""
        if self._last_s is None:
            return f"no token came within {self._timeouts.first_token_s:g} s"
        return f"no further token came within {self._timeouts.token_s:g} s"

    @property
    def _whole_due_s(self) -> float:
        return _behind(self._arrived_s, self._timeouts.request_s)

    @property
    def _token_due_s(self) -> float:
        if self._last_s is None:
            return _behind(self._arrived_s, self._timeouts.first_token_s)
        return _behind(self._last_s, self._timeouts.token_s)


def _behind(start_s: float, timeout_s: float) -> float:
    return start_s + timeout_s if timeout_s else math.inf


LOOKS: Final = 4
#: A limit below so many beats would take one that came a little late for the end.
LEAST_BEATS: Final = 3


class Liveness:
    """The silence of one session; begins when the session does."""

    def __init__(self, limit_s: float, beat_s: float, now_s: float) -> None:
        assert limit_s > 0
        self.limit_s = max(limit_s, LEAST_BEATS * beat_s)
        self._beats = beat_s > 0
        self._last_s = self._looked_s = now_s

    def on_step(self, now_s: float) -> None:
        """Note a step."""
        self._last_s = now_s

    def look(self, now_s: float, has_work: bool) -> bool:
        """Return whether the worker has been silent for too long; ``has_work``: it has requests of ours."""
        late_s = now_s - self._looked_s - self.period_s
        self._looked_s = now_s
        if late_s > self.period_s:
            self._last_s += late_s
        if not (has_work or self._beats):
            self._last_s = now_s
        return now_s - self._last_s >= self.limit_s

    @property
    def period_s(self) -> float:
        """Seconds between two looks at the most; a look that is later than twice that counts as late."""
        return self.limit_s / LOOKS
