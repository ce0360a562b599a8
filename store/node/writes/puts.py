"""Putting values: the waiting around NodeState's decisions.

Owns the futures of puts that wait for room and the copying of inline bytes into the segment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TypeAlias

import numpy as np
import structlog

from tanghulu.errors import InvalidRequest, LeaseExpired, TanghuluError
from tanghulu.rpc.fast_server import Peer
from tanghulu.rpc.latency import Latencies
from tanghulu.store.node.reporting.reporter import Reporter
from tanghulu.store.node.state.chunk import Chunk, ChunkState
from tanghulu.store.node.state.confirmations import ReportOutcome
from tanghulu.store.node.state.node_chunks import NodeChunks
from tanghulu.store.node.state.node_state import NodeState
from tanghulu.store.node.state.outcomes import CommittedBy, Existed, Holder, Reserved, Waiter
from tanghulu.store.node.writes.incoming import IncomingValues
from tanghulu.store.protocol import checksums as sums
from tanghulu.store.protocol.checksums import Checksums
from tanghulu.store.protocol.types import NewChunk
from tanghulu.types import LeaseId

_log = structlog.get_logger(__name__)

#: Bytes checksummed or wiped in one step of the event loop, over all calls: about a millisecond.
STEP_BYTES = 4 << 20
#: Bytes compared before other calls are served: some tenths of a millisecond.
_SLICE_BYTES = 4 << 20
#: Items or keys of a large call served in one step of the loop: about a millisecond.
STEP_ITEMS = 256
#: The outcome of one put: whether the key existed, or its error. An error kept as a value loses its
#: traceback: that refers to the frame, and the frame to the list with the error, a cycle for each.
PutOutcome: TypeAlias = bool | TanghuluError
#: The progress of one put at this node, before the master's decision.
Written: TypeAlias = Reserved | Existed | TanghuluError


class WaitEnd(Enum):
    """Outcome of a put's wait for room; the value is its name in the metrics."""

    SERVED = "served"
    IN_VAIN = "in_vain"  # its deadline passed first
    REFUSED = "refused"  # or its client left

    __hash__ = object.__hash__  # see Pin


class ByteSteps:
    """Work over long ranges in the event loop: after ``STEP_BYTES``, of all calls together, others are served."""

    def __init__(self) -> None:
        self._left_bytes = STEP_BYTES
        self._turn = asyncio.Lock()

    async def over(self, view: memoryview, do: Callable[[memoryview], None], goes_on: Callable[[], bool]) -> None:
        """Call ``do`` with ``view``, piece by piece, while ``goes_on()``, which is called right before each."""
        while view:
            async with self._turn:
                if not self._left_bytes:
                    await asyncio.sleep(0)
                    self._left_bytes = STEP_BYTES
                if not goes_on():
                    return
                piece, view = view[: self._left_bytes], view[self._left_bytes :]
                self._left_bytes -= len(piece)
                do(piece)


class PutService:
    """Reserves, writes, commits and waits for the master, each bounded by a time of the event loop (``until_s``)."""

    def __init__(self, state: NodeState, view: memoryview, reporter: Reporter) -> None:
        self.state, self._chunks, self._leases = state, state.chunks, state.leases
        self._view = view
        self._reporter = reporter
        self._waiting: dict[Waiter, asyncio.Future[Reserved | Existed]] = {}
        self._next_step: asyncio.Handle | None = None
        self.waits = Latencies(WaitEnd)
        self.incoming = IncomingValues(state, self.room_changed)
        self._steps = ByteSteps()
        self._unwiped: set[Chunk] = set()  # reserved for clients that have not received them yet

    def room_changed(self) -> None:
        """Serve waiting puts, as ranges were freed or chunks became evictable."""
        self._chunks.end_call()
        for waiter, outcome in self.state.admit_waiters():
            future = self._waiting.pop(waiter, None)
            if future is None or future.done():
                if isinstance(outcome, Reserved):
                    self.state.take_back(outcome)
            elif isinstance(outcome, TanghuluError):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)
        self._go_on()

    def _go_on(self) -> None:
        """Continue making room, in steps, so that the loop serves others in between."""
        if self.state.has_more_to_do and self._next_step is None:
            self._next_step = asyncio.get_running_loop().call_soon(self._step)

    def _step(self) -> None:
        self._next_step = None
        self.room_changed()

    async def wait_for_room(self, new: NewChunk, holder: Holder | None, until_s: float) -> Reserved | Existed:
        """Return the range of a put that waits its turn; raises StoreFull at ``until_s``."""
        waiter = self.state.wait_for_room(new, holder)
        loop = asyncio.get_running_loop()
        begun_s, end = loop.time(), WaitEnd.REFUSED
        future: asyncio.Future[Reserved | Existed] = loop.create_future()
        self._waiting[waiter] = future
        self._go_on()
        try:
            async with asyncio.timeout_at(until_s):
                served = await future
            end = WaitEnd.SERVED
            return served
        except TimeoutError:
            end = WaitEnd.IN_VAIN
            raise self.state.give_up_waiting(waiter) from None
        finally:
            if end is not WaitEnd.SERVED and future.done() and not future.cancelled() and future.exception() is None:
                self.take_back([future.result()])  # in the very step in which the wait ended
            self.waits.took(end, loop.time() - begun_s)
            self.state.stop_waiting(waiter)
            self._waiting.pop(waiter, None)

    def commit(self, chunk: Chunk, new: NewChunk, *, visible: bool) -> Reserved | Existed:
        """Commit a reservation that the node has filled; its checksums are computed unless ``new`` has them."""
        checksums = new.checksums if new.checksums.parts else sums.compute(self.bytes_of(chunk))
        return self.state.commit(chunk, checksums, CommittedBy.node(visible=visible))

    def commit_incoming(self, peer: Peer, new: NewChunk, *, visible: bool) -> Written:
        """Commit the value of ``peer``, which has arrived in place."""
        try:
            return self.commit(self.incoming.end(peer), new, visible=visible)
        except TanghuluError as error:
            return error.with_traceback(None)

    def end_writing(self, lease_id: int, session_id: int) -> Chunk:
        """End a client's writing under ``lease_id``; ``commit`` the result. Raises LeaseExpired."""
        chunk = self._leases.chunk(lease_id)
        if chunk in self._unwiped:
            raise LeaseExpired(f"reservation {lease_id} has not been granted yet; wait for the answer to RESERVE")
        return self._leases.end_writing(LeaseId(lease_id), session_id)

    async def compute_checksums(self, chunk: Chunk) -> Checksums:
        """Compute the checksums of a client's value sent without any; the chunk stays a reservation meanwhile."""
        running = sums.RunningChecksums(chunk.size_bytes)
        await self._steps.over(self.bytes_of(chunk), running.add, lambda: chunk.state is ChunkState.RESERVED)
        return running.end()

    def settle(
        self,
        written: Sequence[Written],
        *,
        visible: bool,
        until_s: float,
        done: Callable[[list[PutOutcome]], None],
        num_known: int = 0,
    ) -> None:
        """Call ``done`` when the master knows the keys, with whether another put was first. Errors are values.

        Puts with ``visible=False`` are announced too, but not waited for; the master knows the first ``num_known``
        already.
        """
        outcomes: list[PutOutcome] = [e if isinstance(e, TanghuluError) else isinstance(e, Existed) for e in written]
        if not visible or num_known >= len(written):
            self._reporter.kick()
            done(outcomes)
            return
        rest = enumerate(written[num_known:], num_known)
        pending = [(i, each) for i, each in rest if not isinstance(each, TanghuluError)]
        places, chunks = [i for i, _ in pending], [each.chunk for _, each in pending]

        def answered(decisions: list[ReportOutcome]) -> None:
            for place, decision in zip(places, decisions, strict=True):
                outcomes[place] = decision if isinstance(decision, TanghuluError) else outcomes[place] or not decision
            done(outcomes)

        self._reporter.confirm(chunks, until_s, answered)

    async def settled(
        self, written: Sequence[Written], *, visible: bool, until_s: float, num_known: int = 0
    ) -> list[PutOutcome]:
        """``settle`` for coroutines."""
        future: asyncio.Future[list[PutOutcome]] = asyncio.get_running_loop().create_future()
        self.settle(
            written,
            visible=visible,
            until_s=until_s,
            done=lambda outcomes: None if future.done() else future.set_result(outcomes),
            num_known=num_known,
        )
        return await future

    def awaits_master(self, reserved: Sequence[Written]) -> bool:
        """Return whether the master still has to decide on a chunk whose key a put has found to exist."""
        is_pending = self.state.reports.is_pending
        return any(is_pending(each.chunk) for each in reserved if isinstance(each, Existed))

    async def existing_known(self, reserved: Sequence[Written], until_s: float) -> list[Written]:
        """Wait until the master knows the chunks of keys that exist; return ``reserved`` with the errors instead."""
        known: list[Written] = list(reserved)
        places = [place for place, each in enumerate(reserved) if isinstance(each, Existed)]
        outcomes = await self.settled([reserved[place] for place in places], visible=True, until_s=until_s)
        for place, outcome in zip(places, outcomes, strict=True):
            if isinstance(outcome, TanghuluError):
                known[place] = outcome
        return known

    async def removals_acknowledged(self, until_s: float) -> None:
        """Wait until the masters have acknowledged all removals; raises MasterUnavailable."""
        await self._reporter.flushed(until_s)

    def report(self) -> None:
        """Send waiting reports to the masters."""
        self._reporter.kick()

    def verify(self, chunk: Chunk) -> bool:
        """Return whether the chunk's bytes match; drops it if not."""
        if sums.matches(self.bytes_of(chunk), chunk.checksums):
            return True
        _log.error("chunk.corrupt", key=chunk.key, size_bytes=chunk.size_bytes, offset=chunk.offset)
        self._chunks.drop_corrupt(chunk)
        self.room_changed()
        return False

    async def wipe(self, reserved: Sequence[Written]) -> None:
        """Overwrite a client's reservation with zeros; it cannot be committed before.

        A reservation that ends meanwhile is left unchanged: its range may be another's.
        """
        chunks = [each.chunk for each in reserved if isinstance(each, Reserved)]
        self._unwiped.update(chunks)
        try:
            for chunk in chunks:
                assert chunk.state is not ChunkState.LIVE, f"{chunk!r} holds a value"
                await self._steps.over(self.bytes_of(chunk), _wipe, lambda c=chunk: c.state is ChunkState.RESERVED)  # type: ignore[misc]
        finally:
            self._unwiped.difference_update(chunks)

    def take_back(self, reserved: Sequence[Written]) -> None:
        """Drop reservations whose client will not receive them."""
        for each in reserved:
            if isinstance(each, Reserved):
                self.state.take_back(each)
        self.room_changed()

    def abort(self, chunks: Sequence[Chunk]) -> None:
        """Drop reservations that are neither written nor going to be committed."""
        for chunk in chunks:
            self._chunks.abort_reservation(chunk)
        self.room_changed()

    def bytes_of(self, chunk: Chunk) -> memoryview:
        """Return the chunk's bytes in the segment; valid while it is leased, or until the next await."""
        return self._view[chunk.offset : chunk.offset + chunk.size_bytes]


class PutBatch:
    """The puts of one call, in order; ``written`` has the outcomes so far, with errors as values.

    Without ``values`` the ranges are for the client to write, under leases of ``holder``; otherwise the node copies the
    values there and commits them. ``step`` serves what needs no waiting, ``finish`` the rest.
    """

    def __init__(
        self,
        puts: PutService,
        news: Sequence[NewChunk],
        *,
        holder: Holder | None = None,
        values: Sequence[memoryview] | None = None,
        visible: bool = True,
    ) -> None:
        self.written: list[Written] = []
        self._puts, self._news, self._holder, self._values, self._visible = puts, news, holder, values, visible
        self._lacks_room = False  # the next one has to wait

    @property
    def is_complete(self) -> bool:
        """Whether every put has an outcome."""
        return len(self.written) == len(self._news)

    def step(self) -> None:
        """Serve up to STEP_ITEMS puts, as far as possible without waiting."""
        self._lacks_room = False
        for new in self._news[len(self.written) : len(self.written) + STEP_ITEMS]:
            try:
                outcome = self._puts.state.reserve(new, self._holder)
                if outcome is None:
                    self._lacks_room = True
                    break
                self._take(outcome)
            except TanghuluError as error:
                self.written.append(error.with_traceback(None))
        if self._values is not None:
            self._puts.room_changed()

    async def finish(self, until_s: float) -> list[Written]:
        """Serve the other puts, each waiting for room until ``until_s`` if necessary; return all outcomes."""
        while not self.is_complete:
            if self._lacks_room:
                try:
                    new = self._news[len(self.written)]
                    self._take(await self._puts.wait_for_room(new, self._holder, until_s))
                except TanghuluError as error:
                    self.written.append(error.with_traceback(None))
            else:
                await asyncio.sleep(0)
            self.step()
        return self.written

    def _take(self, reserved: Reserved | Existed) -> None:
        if self._values is not None and isinstance(reserved, Reserved):
            place, chunk = len(self.written), reserved.chunk
            self._puts.bytes_of(chunk)[:] = self._values[place]
            self.written.append(self._puts.commit(chunk, self._news[place], visible=self._visible))
        else:
            self.written.append(reserved)


class Verifier:
    """The comparisons of one call's chunks with their checksums, a slice at a time: others are served in between."""

    def __init__(self, chunks: NodeChunks, puts: PutService) -> None:
        self._chunks = chunks
        self._puts = puts
        self._left_bytes = _SLICE_BYTES  # of this turn

    async def drop_if_corrupt(self, chunk: Chunk) -> bool:
        """Return whether the chunk was dropped because its bytes did not match."""
        if await self.is_intact(chunk) or self._chunks.find(chunk.key) is not chunk:
            return False
        return not self._puts.verify(chunk)

    async def is_intact(self, chunk: Chunk) -> bool:
        """Return whether the chunk's bytes match; True for one that is dropped meanwhile."""
        if not chunk.checksums.parts:
            return True
        running = sums.RunningChecksums(chunk.size_bytes, chunk.checksums.part_bytes)
        position = 0
        while position < chunk.size_bytes:
            if self._left_bytes <= 0:
                self._left_bytes = _SLICE_BYTES
                await asyncio.sleep(0)
                if self._chunks.find(chunk.key) is not chunk:
                    return True
            end = min(position + self._left_bytes, chunk.size_bytes)
            running.add(self._puts.bytes_of(chunk)[position:end])
            self._left_bytes -= end - position
            position = end
        return running.end().parts == chunk.checksums.parts


def _wipe(piece: memoryview) -> None:
    np.frombuffer(piece, np.uint8).fill(0)


def remaining_s(deadline_ms: int, default_s: float) -> float:
    """Return a request's deadline in seconds, at most ``default_s``; raises InvalidRequest if it is absurd."""
    if deadline_ms > 24 * 3600 * 1000:
        raise InvalidRequest(f"a deadline of {deadline_ms} ms is longer than a day; give a shorter one")
    return deadline_ms / 1000 if deadline_ms else default_s
