"""Puts that wait for room: first come, first served, bounded, without time. The shell keeps the deadlines."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tanghulu.errors import Overloaded
from tanghulu.store.protocol.types import NewChunk

MAX_WAITERS = 1024


@dataclass(frozen=True, slots=True)
class Holder:
    """Who asks for a lease: the session, and whether it maps the segment itself."""

    session_id: int
    maps: bool


@dataclass(slots=True, eq=False)
class Waiter:
    """One put in the queue. ``holder`` None: the node itself will write the bytes (inline values)."""

    new: NewChunk
    holder: Holder | None


class WaitQueue:
    """A queue in which only the first may be tried; a small put does not overtake a large one for ever."""

    def __init__(self) -> None:
        self._queue: deque[Waiter] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def join(self, waiter: Waiter) -> None:
        """Stand at the end; raises Overloaded if the queue is full."""
        if len(self._queue) >= MAX_WAITERS:
            raise Overloaded(f"{MAX_WAITERS} puts wait for room already")
        self._queue.append(waiter)

    def first(self) -> Waiter:
        """Whose turn it is."""
        return self._queue[0]

    def leave(self, waiter: Waiter) -> None:
        """Give up, or be served; a waiter that has left already is fine."""
        if self._queue and self._queue[0] is waiter:
            self._queue.popleft()
        elif waiter in self._queue:
            self._queue.remove(waiter)
