"""One follower of the directory's events: snapshots of ranges that it cannot resume, then changes.

A follower of a single master requests everything, and gets one snapshot when the directory is complete. One of several
masters is asked for its own ranges of keys; each gets a snapshot as soon as it is completely known, between changes of
the others, and MOVED reports that the master no longer owns it.

A tenant's changes are numbered separately, from 1 in each stream, because the numbers of the log count everybody's.
Such a stream cannot be resumed; the next one begins with a snapshot.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing

from msgspec import structs

from tanghulu.auth.tenants import Identity
from tanghulu.errors import KeysMoved, Overloaded
from tanghulu.store.master.directory.events import Lagged
from tanghulu.store.master.directory.listing import snapshot
from tanghulu.store.master.server import MasterServer
from tanghulu.store.protocol.directory_events import DirectoryEvent, DirectoryEventKind, EventBatch, EventsRequest
from tanghulu.store.protocol.key_slots import ALL_BITS

#: Keys and events of one message.
BATCH_WEIGHT = 8192
SNAPSHOT_KEYS = 2048
#: Events of this time are sent to a follower as one message: a message costs more than the delay is worth.
COALESCE_S = 0.005


async def follow(
    server: MasterServer, request: EventsRequest, caller: Identity | None
) -> AsyncGenerator[EventBatch, None]:
    """Yield the batches for one follower, without end. ``caller`` None: there are no tokens here.

    Raises Overloaded when it lags behind the log, NotLeader or KeysMoved if this is not the master to follow. While the
    directory is incomplete no snapshot is sent: a follower of the master's predecessor keeps its state until there is
    something better.
    """
    server.require_ranges(request.ranges)
    followers = server.metrics.followers.labels("directory")
    followers.inc()
    try:
        async with aclosing(_Follower(server, request, caller).batches()) as batches:
            async for batch in batches:
                yield batch
    finally:
        followers.dec()


class _Follower:
    """State of one follower: the ranges sent to it and those it waits for, a bit each."""

    def __init__(self, server: MasterServer, request: EventsRequest, caller: Identity | None) -> None:
        self._server = server
        self._directory = server.master.directory
        self._generation = server.master.log_generation
        self._prefix, self._is_of_some = request.key_prefix, bool(request.ranges)
        log, after, wanted = self._directory.log, request.after_sequence, request.ranges or ALL_BITS
        self._is_numbered_apart = caller is not None and bool(caller.tenant) and not caller.sees_metrics
        resumes = request.master_generation == self._generation and 0 < after <= log.last and log.first <= after + 1
        resumes &= not self._is_numbered_apart
        self._followed = wanted & ~request.fresh if resumes else 0
        self._pending = wanted & ~self._followed
        self._began = log.last  # earlier events are from another time that this master owned a range
        self._cursor = after if self._followed else log.last
        self._sent = 0 if self._is_numbered_apart else self._cursor

    async def batches(self) -> AsyncGenerator[EventBatch, None]:
        if self._is_of_some and self._pending:
            yield self._batch([DirectoryEvent(self._number, DirectoryEventKind.RESET, ranges=self._pending)])
        while True:
            changes = self._read()
            if changes is not None:
                if changes.events:
                    yield changes
                continue
            ready = self._ready()
            if ready:
                async for batch in self._snapshot(ready):
                    yield batch
                continue
            await self._server.wait()
            if self._followed:
                await asyncio.sleep(COALESCE_S)

    @property
    def _number(self) -> int:
        """The number given by this stream to the follower's last change."""
        return self._sent if self._is_numbered_apart else self._cursor

    # --- snapshots

    def _ready(self) -> int:
        """Return the ranges whose snapshot is due now."""
        if not self._pending:
            return 0
        ready = self._pending & self._directory.rebuilt_ranges
        return ready if self._is_of_some or ready == self._pending else 0

    async def _snapshot(self, ranges: int) -> AsyncGenerator[EventBatch, None]:
        directory, sequence, stored = self._directory, self._number, DirectoryEventKind.STORED
        named = ranges if self._is_of_some else 0
        yield self._batch([DirectoryEvent(sequence, DirectoryEventKind.RESET, ranges=named)])
        began = directory.times_begun(ranges)
        walk, more = directory.walk(ranges), True
        while more:
            page, more = snapshot(directory, walk, self._prefix, SNAPSHOT_KEYS)
            if page:
                yield self._batch(DirectoryEvent(sequence, stored, node, tuple(keys)) for node, keys in page.items())
            await asyncio.sleep(0)  # there may be a million keys without the prefix
        self._pending &= ~ranges
        self._sent = sequence
        if directory.times_begun(ranges) != began or ranges & ~directory.rebuilt_ranges:
            self._lost(ranges)  # some of them left during the snapshot, so its gaps are unknown
            return
        self._followed |= ranges
        yield self._batch([DirectoryEvent(sequence, DirectoryEventKind.SYNCED, ranges=named)])

    def _lost(self, ranges: int) -> None:
        """Restart those of the ranges that are still this master's; MOVED reports the others."""
        if not self._is_of_some:
            raise KeysMoved.known_in(self._server.ownership.map.version)
        self._pending |= ranges

    # --- changes

    def _read(self) -> EventBatch | None:
        """Return the next changes; None if there are none now."""
        log = self._directory.log
        if not self._followed and not self._is_of_some:
            self._cursor = log.last  # the snapshot will contain it
            self._sent = self._number
            return None
        try:
            numbered = log.read(self._cursor, BATCH_WEIGHT)
        except Lagged:
            self._server.metrics.cut_off_followers.inc()
            raise Overloaded("this follower fell behind the events that are kept; subscribe again") from None
        if not numbered:
            return None
        first, self._cursor = self._sent + 1, numbered[-1][0]
        wanted = [kept for number, event in numbered if (kept := self._wanted(number, event)) is not None]
        if self._is_numbered_apart:
            wanted = [structs.replace(event, sequence=number) for number, event in enumerate(wanted, first)]
            self._sent += len(wanted)
        elif wanted:
            self._sent = self._cursor
        return self._batch(wanted, first, self._number)

    def _wanted(self, number: int, event: DirectoryEvent) -> DirectoryEvent | None:
        if event.kind is DirectoryEventKind.MOVED:
            return self._moved(number, event)
        if not self._prefix or event.kind is DirectoryEventKind.NODE_GONE:
            return event
        keys = tuple(key for key in event.keys if key.startswith(self._prefix))
        return DirectoryEvent(event.sequence, event.kind, event.node_id, keys) if keys else None

    def _moved(self, number: int, event: DirectoryEvent) -> DirectoryEvent | None:
        """Return ranges that left: the follower is to ask another master, unless they left before its request here."""
        gone = event.ranges & (self._followed | (self._pending if number > self._began else 0))
        if gone and not self._is_of_some:
            raise KeysMoved.known_in(self._server.ownership.map.version)
        self._followed &= ~gone
        self._pending &= ~gone
        return DirectoryEvent(event.sequence, event.kind, ranges=gone) if gone else None

    def _batch(self, events: Iterable[DirectoryEvent], first: int = 0, last: int = 0) -> EventBatch:
        return EventBatch(self._generation, list(events), first, last)
