"""The minimum rate at which peers must move bytes that something waits for. Pure."""

from __future__ import annotations

from typing import Final

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
