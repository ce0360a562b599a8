"""Putting values: the waiting around NodeState's decisions, for the fast lane and gRPC alike.

Owns the futures of puts that wait for room and the copying of inline bytes into the segment. Knows no protobuf.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from tanghulu.errors import InvalidRequest, TanghuluError
from tanghulu.store import checksums as sums
from tanghulu.store.checksums import Checksums
from tanghulu.store.node.announcer import Announcer
from tanghulu.store.node.chunk import Chunk
from tanghulu.store.node.node_state import NodeState
from tanghulu.store.node.outcomes import Existed, Reserved
from tanghulu.store.node.waiters import Holder, Waiter
from tanghulu.store.words import NewChunk
from tanghulu.types import LeaseId

_log = structlog.get_logger(__name__)

#: What became of one put: whether the key existed, or why it failed.
PutOutcome = bool | TanghuluError


class PutDesk:
    """Reserves, writes, commits and waits for the master, each bounded by a time of the event loop (``until_s``)."""

    def __init__(self, state: NodeState, view: memoryview, announcer: Announcer) -> None:
        self._state = state
        self._view = view
        self._announcer = announcer
        self._waiting: dict[Waiter, asyncio.Future[Reserved | Existed]] = {}

    def room_changed(self) -> None:
        """Ranges were freed or chunks became evictable: serve those who wait."""
        if not self._state.waiters:
            return
        for waiter, outcome in self._state.admit_waiters():
            future = self._waiting.pop(waiter, None)
            if future is None or future.done():
                self._take_back(outcome)
            elif isinstance(outcome, TanghuluError):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

    def _take_back(self, outcome: Reserved | Existed | TanghuluError) -> None:
        if isinstance(outcome, Reserved):
            if outcome.lease_id:
                self._state.freed(self._state.access.release(outcome.lease_id))
            else:
                self._state.abandon(outcome.chunk)

    async def reserve(self, new: NewChunk, holder: Holder | None, until_s: float) -> Reserved | Existed:
        """A range, or that the key is there; waits for leases that stand in the way. Raises as NodeState.reserve."""
        outcome = self._state.reserve(new, holder)
        if not isinstance(outcome, Waiter):
            return outcome
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Reserved | Existed] = loop.create_future()
        self._waiting[outcome] = future
        try:
            return await asyncio.wait_for(future, max(until_s - loop.time(), 0.0))
        except TimeoutError:
            raise self._state.give_up_waiting(outcome) from None
        finally:
            self._state.waiters.leave(outcome)
            self._waiting.pop(outcome, None)

    async def put_all(
        self, items: Sequence[tuple[NewChunk, memoryview]], *, visible: bool, until_s: float
    ) -> list[PutOutcome]:
        """Put many values; they are all written before the master is waited for, so they share an announcement."""
        written: list[Reserved | Existed | TanghuluError] = []
        for new, value in items:
            try:
                written.append(await self.write(new, value, visible=visible, until_s=until_s))
            except TanghuluError as error:
                written.append(error)
        return await self.settle_all(written, visible=visible, until_s=until_s)

    async def write(self, new: NewChunk, value: memoryview, *, visible: bool, until_s: float) -> Reserved | Existed:
        """Reserve, copy, commit; the master is not waited for."""
        reserved = await self.reserve(new, None, until_s)
        if isinstance(reserved, Existed):
            return reserved
        chunk = reserved.chunk
        self._view[chunk.offset : chunk.offset + chunk.size_bytes] = value
        checksums = new.checksums if new.checksums.parts else sums.compute(value)
        return self._state.commit_written(chunk, checksums, visible=visible)

    def commit(self, lease_id: int, session_id: int, checksums: Checksums, *, visible: bool) -> Reserved | Existed:
        """The client has written under ``lease_id``; without checksums of its own the node computes them."""
        chunk = self._state.table.leased(LeaseId(lease_id))
        if chunk is not None and not checksums.parts:
            checksums = chunk.checksums if chunk.checksums.parts else sums.compute(self.bytes_of(chunk))
        return self._state.commit(LeaseId(lease_id), session_id, checksums, visible=visible)

    async def settle_all(
        self, written: Sequence[Reserved | Existed | TanghuluError], *, visible: bool, until_s: float
    ) -> list[PutOutcome]:
        """Wait until the master knows the keys; for each whether somebody else's put was first. Errors are values."""
        outcomes: list[PutOutcome] = [e if isinstance(e, TanghuluError) else isinstance(e, Existed) for e in written]
        if not visible:
            self._announcer.kick()
            return outcomes
        places = [i for i, each in enumerate(written) if not isinstance(each, TanghuluError)]
        chunks = [each.chunk for each in written if not isinstance(each, TanghuluError)]
        for place, word in zip(places, await self._announcer.confirmed(chunks, until_s), strict=True):
            outcomes[place] = word if isinstance(word, TanghuluError) else outcomes[place] or not word
        return outcomes

    async def told_removals(self, until_s: float) -> None:
        """Wait until the master knows what was removed; raises MasterUnavailable."""
        await self._announcer.flushed(until_s)

    def verify(self, chunk: Chunk) -> bool:
        """Whether the chunk's bytes are what was put; drops it if not."""
        if sums.matches(self.bytes_of(chunk), chunk.checksums):
            return True
        _log.error("chunk.corrupt", key=chunk.key, size_bytes=chunk.size_bytes, offset=chunk.offset)
        self._state.drop_corrupt(chunk)
        self.room_changed()
        return False

    def bytes_of(self, chunk: Chunk) -> memoryview:
        """The chunk's bytes in the segment; valid while it is leased, or until the next await."""
        return self._view[chunk.offset : chunk.offset + chunk.size_bytes]


def remaining_s(deadline_ms: int, default_s: float) -> float:
    """A request's own deadline in seconds, bounded by ``default_s``; raises InvalidRequest if it is absurd."""
    if deadline_ms > 24 * 3600 * 1000:
        raise InvalidRequest(f"a deadline of {deadline_ms} ms is longer than a day")
    return deadline_ms / 1000 if deadline_ms else default_s
