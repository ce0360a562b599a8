"""Idle links to one peer, waiting for the next batch. Owns their number; independent of batches."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from tanghulu.errors import NodeUnavailable
from tanghulu.runtime.clock import Clock
from tanghulu.runtime.undo import undo_on_error
from tanghulu.transfer_engine.core.transport import Link


class LinkPool:
    """At most ``max_links`` links, each lent to one borrower; thread-safe.

    The link returned last is lent first, so that few stay warm when few are needed. Taking an idle one and giving it
    back are single list operations, without a lock.
    """

    def __init__(self, connect: Callable[[], Link], max_links: int, clock: Clock) -> None:
        self._connect: Callable[[], Link] | None = connect
        self._max_links = max_links
        self._clock = clock
        self._idle: list[Link] = []
        self._num_links = 0  # idle, lent, or being made
        self._num_waiting = 0
        self._closed = False
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)

    def borrow(self, until_s: float | None) -> Link | None:
        """Return a link, or None when all are lent until ``until_s`` (clock seconds; None does not wait).

        Raises NodeUnavailable if the pool is closed.
        """
        try:
            return self._idle.pop()
        except IndexError:
            return self._borrow_slowly(until_s)

    def give_back(self, link: Link, *, idle: bool = False) -> None:
        """Return a borrowed link; it is closed if something is still under way on it or the pool is closed.

        ``idle``: the caller knows that nothing is under way.
        """
        if idle or link.reusable:
            self._idle.append(link)
            if self._closed:
                self._close_idle()
            elif self._num_waiting:
                with self._lock:
                    self._changed.notify()
        else:
            self._forget()
            link.close()

    def put(self, link: Link) -> None:
        """Add a link made elsewhere (the one that greeted the peer)."""
        with self._lock:
            self._num_links += 1
        self.give_back(link)

    def close(self) -> None:
        """Close the idle links now and the lent ones when they are returned."""
        with self._lock:
            self._closed = True
            self._connect = None  # drops the state shared by the links
            self._changed.notify_all()
        self._close_idle()

    def check(self) -> None:
        """Assert the invariants: bounds hold, and idle links have nothing under way."""
        with self._lock:
            assert len(self._idle) <= self._num_links
            assert not (self._closed and self._idle)
            assert all(link.reusable for link in self._idle)
            for link in self._idle:
                link.check()

    # --- inside

    def _borrow_slowly(self, until_s: float | None) -> Link | None:
        with self._lock:
            self._num_waiting += 1  # before the next look at the idle ones: whoever returns one after that wakes us
            try:
                while True:
                    connect = self._connect
                    if connect is None:
                        raise NodeUnavailable("the segment was closed in this process; open it again")
                    if self._idle:
                        with contextlib.suppress(IndexError):  # another thread took it without the lock
                            return self._idle.pop()
                    if self._num_links < self._max_links:
                        self._num_links += 1
                        break
                    left_s = 0.0 if until_s is None else until_s - self._clock.now_s()
                    if left_s <= 0:
                        return None
                    self._changed.wait(left_s)
            finally:
                self._num_waiting -= 1
        with undo_on_error(self._forget):
            return connect()

    def _forget(self) -> None:
        """Count one link less, so that another may be made."""
        with self._lock:
            self._num_links -= 1
            self._changed.notify()

    def _close_idle(self) -> None:
        while self._idle:
            with contextlib.suppress(IndexError):
                link = self._idle.pop()
                self._forget()
                link.close()
