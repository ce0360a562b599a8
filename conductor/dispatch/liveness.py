"""Whether a worker's engine still computes, judged by the steps that it sends.

Pure. A process may keep its connections and answer calls while its engine stands still, as in a call to a GPU that
never returns. So a worker that sends no step for ``limit_s`` though it has work counts as lost. One that promises a
step at least every ``beat_s``, with or without work, is judged while it is idle too, so that it swallows nobody.

It is looked at LOOKS times in ``limit_s``. A look that comes late says that the looking process itself stood still,
and that steps may lie unread: that time does not count. Example: a limit of 10 s, looks every 2.5 s; the conductor is
stopped for 30 s, and at its first look behind them a worker that spoke 1 s before is silent for 3.5 s, not for 31.
"""

from __future__ import annotations

from typing import Final

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

    def heard(self, now_s: float) -> None:
        """Note a step."""
        self._last_s = now_s

    def look(self, now_s: float, has_work: bool) -> bool:
        """Whether the worker has been silent for too long; ``has_work``: it has requests of ours."""
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
