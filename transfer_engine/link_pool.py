"""Links to one peer that wait for the next batch. Owns how many there are; knows nothing of batches."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tanghulu.clock import Clock
from tanghulu.errors import NodeUnavailable
from tanghulu.transfer_engine.transport import Link


class LinkPool:
    """At most ``max_links`` links, lent to one borrower each; safe to use from several threads.

    The link that came back last is lent first, so that few stay warm when few are needed.
    """

    def __init__(self, connect: Callable[[], Link], max_links: int, clock: Clock) -> None:
        self._connect: Callable[[], Link] | None = connect
        self._max_links = max_links
        self._clock = clock
        self._idle: list[Link] = []
        self._num_lent = 0
        self._num_waiting = 0
        self._closed = False
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)

    def borrow(self, until_s: float | None) -> Link | None:
        """A link, or None when all are lent until ``until_s`` (clock seconds; None: do not wait).

        Raises NodeUnavailable if the pool is closed.
        """
        with self._lock:
            while not self._closed and not self._idle and self._num_lent >= self._max_links:
                left_s = 0.0 if until_s is None else until_s - self._clock.now_s()
                if left_s <= 0:
                    return None
                self._wait(left_s)
            connect = self._connect
            if connect is None:
                raise NodeUnavailable("the segment was closed in this process; open it again")
            self._num_lent += 1
            if self._idle:
                return self._idle.pop()
        try:
            return connect()
        except BaseException:
            with self._lock:
                self._num_lent -= 1
                self._changed.notify()
            raise

    def give_back(self, link: Link) -> None:
        """Return a borrowed link; one with something still under way, or of a closed pool, is closed."""
        keep = link.reusable
        with self._lock:
            self._num_lent -= 1
            keep = keep and not self._closed
            if keep:
                self._idle.append(link)
            if self._num_waiting:
                self._changed.notify()
        if not keep:
            link.close()

    def put(self, link: Link) -> None:
        """Add a link that was made elsewhere (the one that greeted the peer)."""
        with self._lock:
            self._num_lent += 1
        self.give_back(link)

    def close(self) -> None:
        """Close the idle links now and the lent ones when they come back."""
        with self._lock:
            self._closed = True
            self._connect = None  # lets go of what the links share
            idle, self._idle = self._idle, []
            self._changed.notify_all()
        for link in idle:
            link.close()

    def check(self) -> None:
        """Assert the invariants: bounds hold, and idle links have nothing under way."""
        with self._lock:
            assert self._num_lent >= 0
            assert not (self._closed and self._idle)
            assert all(link.reusable for link in self._idle)

    # --- inside

    def _wait(self, seconds: float) -> None:
        self._num_waiting += 1
        try:
            self._changed.wait(seconds)
        finally:
            self._num_waiting -= 1
