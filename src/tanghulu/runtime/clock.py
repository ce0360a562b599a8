"""Clocks, pauses between attempts, and the least rate of a peer.

Time is a value passed in, so that decisions can be tested and simulated in virtual time.
"""

from __future__ import annotations

import secrets
import time
from random import Random
from typing import Final, Protocol


class Clock(Protocol):
    """A monotonic clock in seconds. Its zero has no meaning; only differences do."""

    def now_s(self) -> float:
        """Return the seconds since some fixed point; never goes back."""


class SystemClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        """Return the seconds of ``CLOCK_MONOTONIC``."""
        return time.monotonic()


class Backoff:
    """Pauses between the attempts of one caller, spread so that many callers do not try at the same moments.

    They are about ``first_s``, twice that, and so on up to about ``most_s``, each spread by a half either way.
    Example: 0.05 to 1 s gives 0.04, 0.12, 0.17, 0.55, 0.7, 1.3, 0.6, ...
    """

    def __init__(self, first_s: float, most_s: float, rng: Random | None = None) -> None:
        assert 0 < first_s <= most_s
        self._next_s, self._most_s = first_s, most_s
        self._rng = rng or Random(secrets.randbits(64))

    def pause_s(self) -> float:
        """Return the pause before the next attempt."""
        mean_s, self._next_s = self._next_s, min(2 * self._next_s, self._most_s)
        return mean_s * self._rng.uniform(0.5, 1.5)

    def __repr__(self) -> str:
        return f"Backoff(next about {self._next_s:g} s)"


#: A peer slower than this per second, averaged over a window, is disconnected: it holds memory for nothing.
LEAST_BYTES_S: Final = 64 << 10


class LeastRate:
    """Judge of one peer's rate, window by window.

    Example: ``window_s`` 10. After 10 s 1 MiB has moved: fast enough. After 20 s it is 1 MiB and 1 byte: too slow.
    """

    def __init__(self, window_s: float, now_s: float, moved_bytes: int = 0) -> None:
        self._window_s = window_s
        self._begun_s = now_s
        self._moved_bytes = moved_bytes

    def is_too_slow(self, moved_bytes: int, now_s: float) -> bool:
        """Return whether a window with too little movement has ended; ``moved_bytes`` counts from the beginning."""
        elapsed_s = now_s - self._begun_s
        if elapsed_s < self._window_s:
            return False
        too_slow = moved_bytes - self._moved_bytes < LEAST_BYTES_S * elapsed_s
        self._begun_s, self._moved_bytes = now_s, moved_bytes
        return too_slow
