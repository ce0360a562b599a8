"""The deadlines of one request: of the whole, of its first token, and of each token behind another.

Pure: times go in, a reason to give up comes out. A request that moves keeps its deadlines, as its client waits on.
Example: 60 s for the whole, 10 s for the first token, 5 s between tokens. A request that comes at 0 must have a token
at 10; it comes at 7, so the next is due at 12; and at 60 it ends, whatever has come.
"""

from __future__ import annotations

import math

from tanghulu.conductor.routing.requests import Timeouts


class Deadlines:
    """When a request has waited too long for what comes next."""

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
