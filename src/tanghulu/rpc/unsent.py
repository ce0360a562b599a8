"""The answers not yet taken by peers, of all connections of a process together. Pure.

A connection whose peer is slow is neither read nor answered until the peer has taken what waits. So each holds one
answer and little more; this count bounds their sum. While it is full, makers of large answers make small ones
(``room_bytes``), and peers that have been slow for ``PRESSED_S`` are disconnected. Unfinished requests are counted and
judged in the same way, by their missing bytes.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

from tanghulu.runtime.least_rate import LeastRate

#: Maximum bytes waiting for all slow peers of a process together.
MAX_UNSENT_BYTES: Final = 256 << 20
#: A slow peer that takes less than the minimum rate in this time is disconnected.
SLOW_PEER_S: Final = 30.0
#: A peer slow for this long is disconnected while the process holds ``MAX_UNSENT_BYTES``.
PRESSED_S: Final = 1.0


class UnsentAnswers:
    """The sum over slow peers, and the bytes of answers being made."""

    def __init__(self, most_bytes: int = MAX_UNSENT_BYTES) -> None:
        self.most_bytes = most_bytes
        self.num_bytes = 0
        self._by_peer: dict[Hashable, int] = {}

    def note(self, peer: Hashable, num_bytes: int) -> None:
        """Set the bytes waiting for ``peer``; 0 removes it."""
        self.num_bytes += num_bytes - self._by_peer.pop(peer, 0)
        if num_bytes:
            self._by_peer[peer] = num_bytes

    @property
    def room_bytes(self) -> int:
        """Number of bytes that may be added."""
        return max(0, self.most_bytes - self.num_bytes)

    def check(self) -> None:
        """Assert that the sum is correct."""
        assert self.num_bytes == sum(self._by_peer.values())


class SlowPeer:
    """One peer from the moment it stopped taking its answers."""

    def __init__(self, unsent_bytes: int, now_s: float) -> None:
        self._since_s = now_s
        self._written_bytes = unsent_bytes
        self._rate = LeastRate(SLOW_PEER_S, now_s)

    def written(self, num_bytes: int) -> None:
        """Count ``num_bytes`` more written for it."""
        self._written_bytes += num_bytes

    def is_given_up(self, unsent_bytes: int, unsent: UnsentAnswers, now_s: float) -> bool:
        """Return whether to disconnect the peer, for which ``unsent_bytes`` wait now."""
        if not unsent.room_bytes and now_s - self._since_s >= PRESSED_S:
            return True
        return self._rate.is_too_slow(self._written_bytes - unsent_bytes, now_s)
