"""The least rate at which peers move bytes that something waits for. Pure."""

from __future__ import annotations

from typing import Final

#: A peer that takes or sends less in a second, on average over a window, is given up: it holds memory for nothing.
LEAST_BYTES_S: Final = 64 << 10


class LeastRate:
    """Whether one peer's bytes move fast enough, judged window by window.

    Example: ``window_s`` 10. After 10 s 1 MiB has moved: fast enough. After 10 s more it is 1 MiB and 1 byte: too slow.
    """

    def __init__(self, window_s: float, now_s: float, moved_bytes: int = 0) -> None:
        self._window_s = window_s
        self._begun_s = now_s
        self._moved_bytes = moved_bytes

    def is_too_slow(self, moved_bytes: int, now_s: float) -> bool:
        """Return whether a window has ended in which too little moved; ``moved_bytes`` counts from the beginning."""
        elapsed_s = now_s - self._begun_s
        if elapsed_s < self._window_s:
            return False
        too_slow = moved_bytes - self._moved_bytes < LEAST_BYTES_S * elapsed_s
        self._begun_s, self._moved_bytes = now_s, moved_bytes
        return too_slow
