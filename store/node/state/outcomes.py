"""Requests of a node for room, waiting puts, and the outcomes of puts and gets."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum

from tanghulu.errors import Overloaded
from tanghulu.store.node.state.chunk import Chunk
from tanghulu.store.node.state.holdings import Holding
from tanghulu.store.protocol.types import NewChunk
from tanghulu.types import LeaseId

MAX_WAITERS = 1024
#: The part of a put's size that has to become free before it is tried again.
_RETRY_SHARE = 16


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of a lease: the session, and whether it maps the segment itself."""

    session_id: int
    maps: bool


@dataclass(slots=True, eq=False)
class Waiter:
    """One put in the queue. ``holder`` None: the node itself will write the bytes (inline values)."""

    new: NewChunk
    holder: Holder | None


class WaitQueue:
    """Puts that wait for room, first come first served, bounded and without time: the services keep the deadlines.

    Only the first may be tried, so a small put does not overtake a large one for ever. After a failed try, it is tried
    again when a sixteenth of its size has become free since, or at the next tick if anything has: leases end by the
    thousand, and each try checks the whole memory.
    """

    def __init__(self) -> None:
        self._queue: deque[Waiter] = deque()
        self._freed_bytes: int | None = None  # since the first failed try; None: there was none

    def __len__(self) -> int:
        return len(self._queue)

    def join(self, waiter: Waiter) -> None:
        """Join the end; raises Overloaded if the queue is full."""
        if len(self._queue) >= MAX_WAITERS:
            raise Overloaded(f"{MAX_WAITERS} puts wait for room already; try again")
        self._queue.append(waiter)

    def first(self) -> Waiter:
        """Return the waiter whose turn it is."""
        return self._queue[0]

    @property
    def is_due(self) -> bool:
        """Whether there is a first one, and a reason to try it."""
        if not self._queue or self._freed_bytes is None:
            return bool(self._queue)
        return self._freed_bytes * _RETRY_SHARE >= self._queue[0].new.size_bytes

    def tried_in_vain(self) -> None:
        """Record that the first found no room, and that nothing more can be done for it now."""
        self._freed_bytes = 0

    def freed(self, num_bytes: int) -> None:
        """Record that ``num_bytes`` became free, unused, or evictable."""
        if self._freed_bytes is not None:
            self._freed_bytes += num_bytes

    def tick(self) -> None:
        """Let the first be tried if anything became free."""
        if self._freed_bytes:
            self._freed_bytes = None

    def recheck(self) -> None:
        """Let the first be tried after any event that may concern it, however small."""
        self._freed_bytes = None

    def leave(self, waiter: Waiter) -> None:
        """Remove a waiter that gave up or was served; one that has left already is ignored."""
        if self._queue and self._queue[0] is waiter:
            self._queue.popleft()
            self.recheck()
        elif waiter in self._queue:
            self._queue.remove(waiter)


class CommittedBy(Enum):
    """The side that reports a chunk to the master, and when the chunk is served."""

    #: The client has committed it at the master; it is served at once, and reported with the next message.
    CLIENT = "client"
    #: The node reports it, and serves it when the master agrees or its putter has waited long enough.
    NODE = "node"
    #: The node reports it and serves it meanwhile: its putter does not wait.
    NODE_UNAWAITED = "node, unawaited"

    __hash__ = object.__hash__  # see Pin

    @classmethod
    def node(cls, *, visible: bool) -> CommittedBy:
        """Return the node's side, for a putter that waits until the chunk is visible to all, or does not."""
        return cls.NODE if visible else cls.NODE_UNAWAITED


@dataclass(frozen=True, slots=True)
class Reserved:
    """A range for the writer. ``lease_id`` 0: the node writes. ``copies_only``: the holder must not use its mapping."""

    chunk: Chunk
    lease_id: LeaseId
    copies_only: bool = False


@dataclass(frozen=True, slots=True)
class Existed:
    """The key exists already: nothing to write."""

    chunk: Holding


@dataclass(frozen=True, slots=True)
class Pinned:
    """A chunk that stays where it is until the lease ends."""

    chunk: Chunk
    lease_id: LeaseId
    copies_only: bool
