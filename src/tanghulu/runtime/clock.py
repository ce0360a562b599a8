"""Time as a value passed in, so that decisions can be tested and simulated in virtual time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock in seconds. Its zero has no meaning; only differences do."""

    def now_s(self) -> float:
        """Return the seconds since some fixed point; never goes back."""


class SystemClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        """Return the seconds of ``CLOCK_MONOTONIC``."""
        return time.monotonic()


class ManualClock:
    """Virtual time for tests and simulation; moves only by ``advance``."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        """Return the virtual time in seconds."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move time forward by ``seconds`` (asserts that it is not negative)."""
        assert seconds >= 0, "time does not go back"
        self._now_s += seconds
