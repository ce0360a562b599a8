"""A clock that tests move."""

from __future__ import annotations


class ManualClock:
    """Virtual time that moves only by ``advance``."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        """Return the virtual time in seconds."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move time forward by ``seconds`` (asserts that it is not negative)."""
        assert seconds >= 0, "time does not go back"
        self._now_s += seconds
