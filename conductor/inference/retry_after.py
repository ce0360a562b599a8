"""When a client that is refused should come back: when the requests that wait now will have been taken up.

By Little's law, requests that wait over requests that end in a second. Example: 1,024 wait, and 17 a second ended of
late: Retry-After is 61, cut to MOST_S.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

#: The shortest and the longest time that a client is asked to wait.
LEAST_S: Final = 1
MOST_S: Final = 60
#: Ends before that say nothing about now.
WINDOW_S: Final = 30.0
_MAX_ENDS: Final = 1024


class RetryAfter:
    """Counts the requests that end, and tells from it how long a queue will take. Pure."""

    def __init__(self, now_s: float) -> None:
        self._began_s = now_s
        self._ends: deque[float] = deque(maxlen=_MAX_ENDS)

    def ended(self, now_s: float) -> None:
        """Note that a request has ended, and so made way for another."""
        self._ends.append(now_s)

    def seconds(self, num_waiting: int, now_s: float) -> int:
        """Seconds until ``num_waiting`` requests will have been taken up; MOST_S where none ends at all."""
        while self._ends and self._ends[0] < now_s - WINDOW_S:
            self._ends.popleft()
        if not num_waiting:
            return LEAST_S
        if not self._ends:
            return MOST_S
        since_s = self._ends[0] if len(self._ends) == _MAX_ENDS else max(self._began_s, now_s - WINDOW_S)
        rate = len(self._ends) / max(now_s - since_s, 1e-3)
        return min(MOST_S, max(LEAST_S, math.ceil(num_waiting / rate)))
