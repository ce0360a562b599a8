"""Tells the master what the node holds: the shell around AnnouncementQueue.

One message is under way at a time; puts that come meanwhile share the next. Without a master the queue waits and the
connection is tried again; a put's own deadline then ends its wait, the chunk stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

import structlog

from tanghulu.errors import MasterUnavailable, TanghuluError
from tanghulu.protos import directory_pb2, fastlane_pb2
from tanghulu.rpc.fast_aio import AsyncFastConnection
from tanghulu.store.node.announcements import Announcement, Report
from tanghulu.store.node.chunk import Chunk
from tanghulu.store.node.node_state import NodeState
from tanghulu.types import Address, InstanceId

_log = structlog.get_logger(__name__)

#: Evictions alone wait this long for company; readers find out at once anyway.
REMOVALS_DELAY_S = 0.05
HEARTBEAT_S = 1.0
CALL_DEADLINE_S = 3.0
_RETRY_S = (0.05, 0.1, 0.2, 0.5)
_REPORTS = {
    Report.NONE: directory_pb2.AnnounceRequest.NONE,
    Report.BEGIN: directory_pb2.AnnounceRequest.BEGIN,
    Report.PIECE: directory_pb2.AnnounceRequest.PIECE,
    Report.END: directory_pb2.AnnounceRequest.END,
}


class Announcer:
    """Runs as one task. ``on_change`` is called after the master's answers changed chunks."""

    def __init__(
        self,
        state: NodeState,
        master: Address,
        generation: int,
        on_change: Callable[[], None],
    ) -> None:
        self._state = state
        self._queue = state.announcements
        self._master = master
        self._instance_id = InstanceId("")
        self._generation = generation
        self._on_change = on_change
        self._connection: AsyncFastConnection | None = None
        self._sleeping: asyncio.Future[None] | None = None
        self._waiting: dict[Chunk, list[asyncio.Future[bool]]] = {}
        self._flushes: list[asyncio.Future[bool]] = []
        self._flushing: list[asyncio.Future[bool]] = []
        self.connected = asyncio.Event()

    def kick(self) -> None:
        """There is something to tell; costs nothing while a message is under way."""
        if self._sleeping is not None and not self._sleeping.done():
            self._sleeping.set_result(None)

    async def confirmed(self, chunks: Sequence[Chunk], until_s: float) -> list[bool | TanghuluError]:
        """Wait for the master's word on each chunk: whether this put was the first.

        MasterUnavailable comes in the place of those that it did not confirm until ``until_s`` (the loop's time);
        they stay and are announced later.
        """
        futures = [self._expect(chunk) for chunk in chunks]
        self.kick()
        timer = asyncio.get_running_loop().call_at(until_s, self._expire, futures)
        outcomes: list[bool | TanghuluError] = []
        try:
            for future in futures:
                try:
                    outcomes.append(future is None or await future)
                except TanghuluError as error:
                    outcomes.append(error)
        finally:
            timer.cancel()
            for chunk, future in zip(chunks, futures, strict=True):
                if future is not None:
                    self._leave(chunk, future)
        return outcomes

    async def flushed(self, until_s: float) -> None:
        """Wait until the master knows everything that was removed before; raises MasterUnavailable at ``until_s``."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bool] = loop.create_future()
        self._flushes.append(future)
        self.kick()
        timer = loop.call_at(until_s, self._expire, [future])
        try:
            await future
        finally:
            timer.cancel()

    def _expect(self, chunk: Chunk) -> asyncio.Future[bool] | None:
        if not self._queue.is_pending(chunk):
            return None
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(chunk, []).append(future)
        return future

    def _leave(self, chunk: Chunk, future: asyncio.Future[bool]) -> None:
        futures = self._waiting.get(chunk)
        if futures is None:
            return
        futures.remove(future)
        if not futures:  # nobody waits: it need not be held back any longer
            del self._waiting[chunk]
            self._state.gave_up(chunk)
            self._on_change()

    def _expire(self, futures: Sequence[asyncio.Future[bool] | None]) -> None:
        for future in futures:
            if future is not None and not future.done():
                future.set_exception(
                    MasterUnavailable(
                        f"the master at {self._master} did not answer this node before the deadline; what was put "
                        "stays here and will be announced, what was removed is gone"
                    )
                )

    async def run(self, instance_id: InstanceId) -> None:
        """Announce as ``instance_id`` until cancelled; the first message begins a report."""
        self._instance_id = instance_id
        self._queue.begin_report(self._state.live_chunks())
        failures = 0
        try:
            while True:
                if failures == 0:
                    await self._pause()
                self._flushing += self._flushes
                self._flushes.clear()
                try:
                    await self._send(self._queue.take())
                    failures = 0
                except TanghuluError as error:
                    await self._failed(error, failures)
                    failures += 1
        finally:
            await self._disconnect()

    async def _pause(self) -> None:
        """Until something is urgent, removals have waited long enough, or it is time for a sign of life."""
        loop = asyncio.get_running_loop()
        until = loop.time() + HEARTBEAT_S
        while not self._queue.urgent and not self._flushes:
            if not self._queue.empty:
                until = min(until, loop.time() + REMOVALS_DELAY_S)
            if loop.time() >= until:
                return
            self._sleeping = loop.create_future()
            timer = loop.call_at(until, self.kick)
            await self._sleeping
            timer.cancel()

    async def _send(self, message: Announcement) -> None:
        if self._connection is None or self._connection.closed:
            self._connection = await AsyncFastConnection.connect(self._master)
        request = directory_pb2.AnnounceRequest(
            node_id=self._instance_id,
            generation=self._generation,
            removed=message.removed,
            deleted=message.deleted,
            report=_REPORTS[message.report],
            capacity_bytes=self._state.capacity_bytes,
            used_bytes=self._state.used_bytes,
        )
        for chunk in message.added:
            request.added.add(key=chunk.key, version=chunk.version, size_bytes=chunk.size_bytes)
        reply = await self._connection.call(
            fastlane_pb2.METHOD_ANNOUNCE, request, directory_pb2.AnnounceReply, deadline_s=CALL_DEADLINE_S
        )
        accepted = reply.message.accepted
        if len(accepted) != len(message.added):
            raise MasterUnavailable(f"{self._master} answered {len(accepted)} of {len(message.added)} announcements")
        self._answered(message, list(accepted), reply.message.report_wanted)

    def _answered(self, message: Announcement, accepted: list[bool], report_wanted: bool) -> None:
        self._queue.done()
        if not self.connected.is_set():
            self.connected.set()
            _log.info("announcer.connected", master=str(self._master))
        for chunk, stands in zip(message.added, accepted, strict=True):
            self._state.announced(chunk, accepted=stands)
            _resolve(self._waiting.pop(chunk, ()), stands)
        if self._queue.removals_told:
            _resolve(self._flushing, True)
            self._flushing.clear()
        if report_wanted:
            _log.info("announcer.report", num_chunks=len(self._state.table))
            self._queue.begin_report(self._state.live_chunks())
        if message.added:
            self._on_change()

    async def _failed(self, error: TanghuluError, failures: int) -> None:
        if self._queue.requeue():
            self._queue.begin_report(self._state.live_chunks())
        if failures == 0:
            _log.warning("announcer.failed", master=str(self._master), code=error.code, error=error.message)
        self.connected.clear()
        if self._connection is not None and error.code in ("NODE_UNAVAILABLE", "DEADLINE_EXCEEDED"):
            await self._disconnect()
        await asyncio.sleep(_RETRY_S[min(failures, len(_RETRY_S) - 1)])

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


def _resolve(futures: Iterable[asyncio.Future[bool]], value: bool) -> None:
    for future in futures:
        if not future.done():
            future.set_result(value)
