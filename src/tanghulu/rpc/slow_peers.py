"""Slow peers: answers that they do not take, requests that they do not finish, and the end of their connections.

A connection whose peer is slow is neither read nor answered until the peer has taken what waits. So each holds one
answer and little more; ``PendingBytes`` bounds their sum over all connections of a process. While it is full, makers
of large answers make small ones (``room_bytes``), and peers that have been slow for ``PRESSED_S`` are disconnected.
Unfinished requests are counted and judged in the same way, by their missing bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Final, NamedTuple

from tanghulu.runtime.clock import LeastRate

#: Maximum bytes waiting for all slow peers of a process together.
MAX_UNSENT_BYTES: Final = 256 << 20
#: A slow peer that takes less than the minimum rate in this time is disconnected.
SLOW_PEER_S: Final = 30.0
#: A peer slow for this long is disconnected while the process holds ``MAX_UNSENT_BYTES``.
PRESSED_S: Final = 1.0
#: Interval of looking at a slow peer.
_LOOK_S = 1.0


class PendingBytes:
    """Bytes held for slow peers, by peer and in sum, and the bytes of answers being made."""

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

    def is_given_up(self, unsent_bytes: int, unsent: PendingBytes, now_s: float) -> bool:
        """Return whether to disconnect the peer, for which ``unsent_bytes`` wait now."""
        if not unsent.room_bytes and now_s - self._since_s >= PRESSED_S:
            return True
        return self._rate.is_too_slow(self._written_bytes - unsent_bytes, now_s)


class Due(NamedTuple):
    """Bytes of ``subject`` that a peer has yet to move, and the memory held here for it."""

    subject: object
    left_bytes: int
    held_bytes: int


class SlowPeerWatch:
    """Looks at one peer while it is slow in one direction, and gives it up when it is too slow.

    ``due`` returns what the peer has to move now, None if nothing; ``give_up`` receives the bytes left.
    """

    def __init__(self, total: PendingBytes, due: Callable[[], Due | None], give_up: Callable[[int], None]) -> None:
        self.is_on = False
        self._total, self._due, self._give_up = total, due, give_up
        self._subject: object = None
        self._peer = SlowPeer(0, 0.0)
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Begin to look, unless it has begun."""
        if not self.is_on:
            self._look()

    def added(self, num_bytes: int) -> None:
        """Count ``num_bytes`` more written for the slow peer."""
        self._peer.written(num_bytes)
        self._note()

    def end(self) -> None:
        """Stop looking: the peer keeps up, or is gone."""
        self.is_on = False
        self._total.note(self, 0)
        if self._timer is not None:
            self._timer.cancel()

    def _note(self) -> Due | None:
        due = self._due()
        self._total.note(self, 0 if due is None else due.held_bytes)
        return due

    def _look(self) -> None:
        due, loop = self._note(), asyncio.get_running_loop()
        if due is None:
            self.is_on = False
            return
        if not self.is_on or due.subject is not self._subject:
            self.is_on, self._subject, self._peer = True, due.subject, SlowPeer(due.left_bytes, loop.time())
        elif self._peer.is_given_up(due.left_bytes, self._total, loop.time()):
            self._give_up(due.left_bytes)
            return
        self._timer = loop.call_later(_LOOK_S, self._look)
