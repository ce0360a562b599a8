"""Timeouts of the conductor: for the next output of a request, and for the next step of a worker. Pure.

**A request** has deadlines for the whole answer, the first token and each further token; it keeps them when it moves.
Example: 60 s for the whole answer, 10 s for the first token, 5 s between tokens. A request that arrives at 0 must have
a token by 10; the token comes at 7, so the next is due at 12; at 60 the request ends in any case.

**A worker** may keep its connections and answer calls while its engine hangs, as in a GPU call that never returns. A
worker with work that sends no step for ``limit_s`` counts as lost. One that promises a step at least every ``beat_s``,
with or without work, is also checked while idle. It is checked LOOKS times per ``limit_s``; a late check means that the
checking process itself was stopped, so that time does not count. Example: a limit of 10 s, checks every 2.5 s; the
conductor is stopped for 30 s. At its first check afterwards, a worker whose last step came 1 s before the stop has been
silent for 3.5 s, not 31.
"""

from __future__ import annotations

import math
from typing import Final

from tanghulu.conductor.routing.requests import Timeouts


class Deadlines:
    """Deadlines of one request."""

    def __init__(self, timeouts: Timeouts, arrived_s: float) -> None:
        self._timeouts = timeouts
        self._arrived_s = arrived_s
        self._last_s: float | None = None

    def came(self, now_s: float) -> None:
        """Record the arrival of tokens."""
        self._last_s = now_s

    @property
    def due_s(self) -> float:
        """Time of the next deadline if no tokens come; infinite if there is none."""
        return min(self._whole_due_s, self._token_due_s)

    def missed(self, now_s: float) -> str:
        """Return the missed deadline, for people, or "" if none is missed."""
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
#: Fewest beats in a limit; with fewer, a beat that came slightly late would count as a lost worker.
LEAST_BEATS: Final = 3


class Liveness:
    """Silence of one session, from the start of the session."""

    def __init__(self, limit_s: float, beat_s: float, now_s: float) -> None:
        assert limit_s > 0
        self.limit_s = max(limit_s, LEAST_BEATS * beat_s)
        self._beats = beat_s > 0
        self._last_s = self._looked_s = now_s

    def on_step(self, now_s: float) -> None:
        """Record a step."""
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
        """Longest time in seconds between two checks; a check later than twice that counts as late."""
        return self.limit_s / LOOKS
