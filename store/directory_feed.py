"""Following the directory from outside: the masters' event streams as values, over restarts, losses and moves.

``async for batch in follow_directory(address, "kv/")`` gives lists of DirectoryEvent. The first is RESET: forget
everything; then STORED events up to SYNCED; then changes. After an interruption it resumes where it stopped, if the
master still has the events since; otherwise RESET comes again, and the follower's state stays valid until then. If
several masters share the ranges of keys there is a stream from each of them, and the differences of a range that
changed hands come as changes; see ``followed_ranges``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing, suppress

import structlog

from tanghulu.auth.certificate_roles import MASTER
from tanghulu.discovery.masters import ATTEMPT_S, MasterFinder
from tanghulu.errors import MasterUnavailable, TanghuluError, Unauthorized
from tanghulu.masters import Masters
from tanghulu.rpc import greeting
from tanghulu.rpc.fast_aio import AsyncFastConnection
from tanghulu.rpc.streams import receive_all
from tanghulu.store.followed_ranges import MOST_KEYS, FollowedRanges, OwnerStream
from tanghulu.store.protocol.directory_events import DirectoryEvent, DirectoryEventKind, EventBatch, EventsRequest
from tanghulu.store.protocol.messages import MastersReply, MastersRequest
from tanghulu.store.protocol.methods import EVENTS, MASTERS
from tanghulu.store.protocol.range_map import RangeMap
from tanghulu.types import Address

__all__ = ["DirectoryEvent", "DirectoryEventKind", "follow_directory"]

_log = structlog.get_logger(__name__)
_RETRY_S = 0.2
#: Time until a refused token is presented again: somebody has to act first.
_REFUSED_S = 5.0
#: Batches of all streams waiting for the follower's user; beyond it the streams wait.
_MAX_BATCHES = 16
#: Seconds without a beat after which a master counts as lost: one of several, and a single one without replacement.
_SILENCE_S, _SILENCE_OF_ONE_S = 2.5, 20.0


async def follow_directory(
    masters: Masters | Address | str, key_prefix: str = "", most_keys: int = MOST_KEYS
) -> AsyncIterator[list[DirectoryEvent]]:
    """Yield the directory's events for keys that begin with ``key_prefix``, without end; waits for absent masters.

    Close the generator (or cancel its task) to stop. A master that begins to report a range sends its snapshot when
    that is complete; until then nothing comes of it. With several masters ``most_keys`` keys are remembered, about 150
    bytes each; with more of them a change of masters is a RESET.
    """
    feed = _Feed(Masters.of(masters), key_prefix, most_keys)
    async with aclosing(feed.batches()) as batches:
        async for events in batches:
            yield events


class _Feed:
    """The driver of FollowedRanges: requests the map, keeps the streams open, and takes their batches in turn."""

    def __init__(self, masters: Masters, key_prefix: str, most_keys: int) -> None:
        self._finder = MasterFinder(masters)
        self._masters = masters
        self._key_prefix = key_prefix
        self._ranges = FollowedRanges(most_keys)
        self._waiting: asyncio.Queue[tuple[OwnerStream, EventBatch]] = asyncio.Queue(_MAX_BATCHES)
        self._tasks: dict[OwnerStream, asyncio.Task[None]] = {}
        self._doubt = asyncio.Event()
        self._pause_s = _RETRY_S

    async def batches(self) -> AsyncGenerator[list[DirectoryEvent], None]:
        """Yield the events for the user."""
        self._doubt.set()
        keeping = asyncio.create_task(self._keep_streams())
        try:
            while True:
                stream, batch = await self._next(keeping)
                events = self._take(stream, batch)
                if events:
                    yield events
        finally:
            tasks = [keeping, *self._tasks.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _next(self, keeping: asyncio.Task[None]) -> tuple[OwnerStream, EventBatch]:
        if self._waiting.empty():
            getting = asyncio.ensure_future(self._waiting.get())
            try:
                await asyncio.wait({getting, keeping}, return_when=asyncio.FIRST_COMPLETED)
                if keeping.done():
                    keeping.result()
                return await getting
            finally:
                getting.cancel()
        return self._waiting.get_nowait()

    def _take(self, stream: OwnerStream, batch: EventBatch) -> list[DirectoryEvent]:
        events, first, last = batch.events, batch.first_sequence, batch.last_sequence
        changes = self._ranges.take(stream, batch.master_generation, events, first, last)
        if changes is None:
            _log.warning("directory_events.gap", at=repr(stream.cursor), first=first)
            if stream in self._tasks:
                self._tasks[stream].cancel()
        if self._ranges.is_doubtful:
            self._doubt.set()
        return changes or []

    # --- streams

    async def _keep_streams(self) -> None:
        """Keep a stream from each owner while the map is certain; otherwise look it up first."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._doubt.wait()
                self._doubt.clear()
                self._pause_s = _RETRY_S
                try:
                    await self._look_up()
                except TanghuluError as error:
                    self._interrupted(error)
                for stream in self._ranges.to_open():
                    self._tasks[stream] = tasks.create_task(self._follow(stream))
                for stream, task in self._tasks.items():
                    if not self._ranges.is_current(stream):
                        task.cancel()
                await asyncio.sleep(self._pause_s)
                if self._ranges.is_doubtful:
                    self._doubt.set()

    async def _follow(self, stream: OwnerStream) -> None:
        try:
            async for batch in self._batches_of(stream):
                await self._waiting.put((stream, batch))
        except TanghuluError as error:
            self._interrupted(error)
            self._finder.failed(stream.owner, error)
        finally:
            del self._tasks[stream]
            self._ranges.lost(stream)
            self._doubt.set()

    def _interrupted(self, error: TanghuluError) -> None:
        _log.warning("directory_events.interrupted", error=error.message, code=error.code)
        if isinstance(error, Unauthorized):
            self._pause_s = _REFUSED_S

    async def _batches_of(self, stream: OwnerStream) -> AsyncGenerator[EventBatch, None]:
        """Yield the batches of one stream; raises when the master is lost, or does not own the ranges."""
        ranges, cursor = 0 if stream.is_whole else stream.ranges, stream.cursor
        request = EventsRequest(
            self._key_prefix, cursor.resumes_after, cursor.master_generation, ranges, ranges & ~cursor.synced
        )
        several = self._masters.several or not stream.is_whole
        connection = await self._connect(stream.owner)
        silence_s = _SILENCE_S if several else _SILENCE_OF_ONE_S
        async with aclosing(receive_all(connection, EVENTS.call(request), silence_s)) as batches:
            async for batch in batches:
                if batch.events or batch.first_sequence:
                    yield batch

    # --- the map

    async def _look_up(self) -> None:
        """Look up the masters to follow. Raises the reason if none could answer."""
        known = self._ranges.map
        if known is None or not known.version:
            address = await self._finder.find()
            try:
                self._learn(address, await self._masters_of(address))
            except TanghuluError as error:
                self._finder.failed(address, error)
                raise
            return
        asked = {owner for owner in known.owners if owner is not None}
        if self._masters.in_etcd:
            with suppress(MasterUnavailable):  # there is no leader now
                asked.add(await self._finder.find())
        else:
            asked.update(self._masters.addresses)
        maps = await self._masters_of_all(asked)
        if maps:
            self._learn(*max(maps, key=lambda each: each[1].version))

    async def _masters_of_all(self, addresses: Iterable[Address]) -> list[tuple[Address, MastersReply]]:
        """Return the answers of the masters that gave one; raises MasterUnavailable if none did."""
        asked = list(addresses)
        answers = await asyncio.gather(*map(self._masters_of, asked), return_exceptions=True)
        maps: list[tuple[Address, MastersReply]] = []
        for address, answer in zip(asked, answers, strict=True):
            if isinstance(answer, MastersReply):
                maps.append((address, answer))
            elif not isinstance(answer, TanghuluError):
                raise answer
        if not maps:
            raise MasterUnavailable(f"none of {', '.join(map(str, asked))} reported the owners of the keys")
        return maps

    def _learn(self, address: Address, reply: MastersReply) -> None:
        known = self._ranges.map
        if not reply.version:
            self._ranges.take_map(RangeMap.of_one(address))
        elif reply.map is not None and reply.map.replaces(known):
            self._ranges.take_map(reply.map, reply.key_scope)
            _log.info("directory_events.map", version=reply.version, owners=len(set(reply.addresses)))

    async def _masters_of(self, address: Address) -> MastersReply:
        """Return the master's view of all masters."""
        request = MastersRequest.newer_than(self._ranges.map)
        connection = await self._connect(address)
        try:
            return (await connection.call(MASTERS.number, request, MASTERS.reply, deadline_s=ATTEMPT_S)).message
        finally:
            await connection.close()

    async def _connect(self, address: Address) -> AsyncFastConnection:
        return await greeting.connect(address, self._masters.credentials_for(address), MASTER, ATTEMPT_S)
