"""A node's SSD tier: performs the decisions of ``TierState``, with threads for the file and bounded buffers.

Demotion: an evicted chunk's bytes are copied into a buffer in the step that evicts it, so its range in memory is free
at once; one thread writes and wipes in the order of the decisions. When the buffers are used up the chunk is dropped,
and counted: a put never waits for the disk. Promotion: see ``promotion``. Belongs to the node's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import time as unix_time_s
from typing import TypeAlias

import structlog

from tanghulu.errors import ChunkNotFound, DeadlineExceeded, NodeUnavailable
from tanghulu.eviction.base import Policy
from tanghulu.runtime.clock import Clock
from tanghulu.store.node.ssd.admission import TierAdmission
from tanghulu.store.node.ssd.file import Arena, IoBuffer, TierFile
from tanghulu.store.node.ssd.state import Instruction, LostChunk, TierState, Wipe, Write
from tanghulu.store.node.state.chunk import Chunk
from tanghulu.store.node.state.ssd_chunk import SsdChunk, SsdChunkState
from tanghulu.store.node.state.ssd_record import SsdRecord, decode_head, encode_head
from tanghulu.store.protocol import checksums as sums

_log = structlog.get_logger(__name__)

MIN_SSD_BYTES = 1 << 20
#: Errors of a full disk, quota or limit.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: Bytes being demoted, and being promoted; also the largest record of each.
QUEUE_BYTES = 64 << 20
NUM_READ_THREADS = 4
#: Seconds that a stop waits for the disk.
CLOSE_DEADLINE_S = 5.0
#: Writes and wipes passed to the thread at once, and their bytes: the buffers return when all are done.
_BATCH = 32
_BATCH_BYTES = 8 << 20
#: Records of the file entered at a time when the node starts: some 4 us each.
_RECOVERED_AT_ONCE = 512


@dataclass(frozen=True, slots=True)
class _Pending:
    """A write with its filled buffer, or a wipe; ``final``: a caller relies on the chunk not coming back."""

    instruction: Write | Wipe
    buffer: IoBuffer | None
    final: bool


_Outcome: TypeAlias = OSError | None


@dataclass(frozen=True, slots=True)
class SsdPlace:
    """The operator's choice: a file, or a directory with one file per node, named by its port."""

    path: Path
    size_bytes: int
    port: int

    @property
    def file(self) -> Path:
        """The file."""
        return self.path / f"node-{self.port}.tier" if self.path.is_dir() else self.path


class SsdTier:
    """See the module. ``view`` is the node's memory; ``on_lost`` gets every chunk that is no longer available here."""

    def __init__(self, file: TierFile, state: TierState, view: memoryview, on_lost: Callable[[SsdChunk], None]) -> None:
        self.state, self.counters = state, state.counters
        self.find, self.entries, self.touch, self.promoted = state.find, state.entries, state.touch, state.promoted
        self.switch_policy = state.switch_policy
        self.file = file
        self._view = view
        self._on_lost = on_lost
        self._down, self._up = Arena(QUEUE_BYTES), Arena(QUEUE_BYTES)
        self._pending: deque[_Pending] = deque()
        self._under_way: list[_Pending] = []
        self._batch: asyncio.Future[list[_Outcome]] | None = None
        self.num_given = self._num_done = 0  # decisions of the state
        self._settling: list[tuple[int, asyncio.Future[None]]] = []
        self._buffer_freed = asyncio.Event()  # set for a moment
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="tier-write")
        self._readers = ThreadPoolExecutor(NUM_READ_THREADS, thread_name_prefix="tier-read")
        self._sync_wanted = False
        self._failed_wipe: tuple[int, OSError] | None = None  # the last final one, with its number
        self._closed = self._has_shrunk = False

    async def populate(self) -> None:
        """Allocate the memory for demotions now; otherwise the first large evictions would, and block the loop."""
        await asyncio.get_running_loop().run_in_executor(self._readers, self._down.populate)

    async def recover(self) -> None:
        """Enter the file's contents; to be called once, before anything else."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self._readers, lambda: list(self.file.scan()))
        except OSError as error:
            _log.error("tier.scan_failed", path=str(self.file.path), error=str(error), now="starts with what was read")
            found = []
        now_s = unix_time_s()
        for number, (offset, record) in enumerate(found, 1):
            self._perform(self.state.recover(record, offset, now_s))
            if number % _RECOVERED_AT_ONCE == 0:
                await asyncio.sleep(0)
        _log.info("tier.open", path=str(self.file.path), direct=self.file.direct, num_chunks=len(self.state))

    # --- requests of the node's decisions; all take effect at once

    @property
    def capacity_bytes(self) -> int:
        """Bytes that the file can hold."""
        return self.state.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the file that are not free."""
        return self.state.used_bytes

    def demote(self, chunk: Chunk, left_s: float | None) -> SsdChunk | None:
        """Keep ``chunk``, which is leaving memory, where its bytes still are. None if it is dropped."""
        now_s = unix_time_s()
        ends_unix_s = None if left_s is None else now_s + left_s
        record = SsdRecord(
            chunk.key,
            chunk.version,
            chunk.size_bytes,
            chunk.checksums,
            chunk.pin,
            ends_unix_s,
            left_s or 0.0,
            chunk.replicas,
            self.state.next_sequence(now_s),
        )
        entry, instructions = self.state.evicted(record, chunk.expires_s, chunk.num_hits, self._down.largest_free_bytes)
        self._perform(instructions, chunk)
        return entry

    def drop(self, entry: SsdChunk) -> None:
        """Drop ``entry``; once ``settled`` has returned, it will not come back."""
        self._sync_wanted = True
        self._perform(self.state.drop(entry), final=True)

    def expire(self, now_s: float) -> None:
        """Drop expired entries."""
        self._perform(self.state.expire(now_s))

    # --- down

    def _perform(self, instructions: Sequence[Instruction], chunk: Chunk | None = None, *, final: bool = False) -> None:
        for each in instructions:
            if isinstance(each, LostChunk):
                self._on_lost(each.entry)
                continue
            buffer = None
            if isinstance(each, Write):
                assert chunk is not None, "only an evicted chunk is written"
                buffer = self._fill(each.entry, chunk)
            self._pending.append(_Pending(each, buffer, final))
            self.num_given += 1
        self._work()

    def _fill(self, entry: SsdChunk, chunk: Chunk) -> IoBuffer:
        record = entry.record
        buffer = self._down.take(record.record_bytes)
        assert buffer is not None, "the state was told how much fits"
        head = encode_head(record, entry.offset, self.file.file_id)
        end = len(head) + record.size_bytes
        buffer.view[: len(head)] = head
        buffer.view[len(head) : end] = self._view[chunk.offset : chunk.offset + chunk.size_bytes]
        buffer.view[end:] = bytes(len(buffer.view) - end)
        return buffer

    def _work(self) -> None:
        if self._under_way or not self._pending or self._closed:
            return
        num_bytes = 0
        while self._pending and len(self._under_way) < _BATCH and num_bytes < _BATCH_BYTES:
            pending = self._pending.popleft()
            self._under_way.append(pending)
            num_bytes += 0 if pending.buffer is None else len(pending.buffer.view)
        sync = self._sync_wanted
        self._sync_wanted = sync and bool(self._pending)
        loop = asyncio.get_running_loop()
        self._batch = loop.run_in_executor(self._writer, _write_all, self.file, self._under_way, sync)
        self._batch.add_done_callback(self._written)

    def _written(self, future: asyncio.Future[list[_Outcome]]) -> None:
        batch, self._under_way = self._under_way, []
        is_full = any(error is not None and error.errno in _FULL for error in future.result())
        unbacked = self.file.unbacked() if is_full else []
        for number, (pending, error) in enumerate(zip(batch, future.result(), strict=True), self._num_done + 1):
            if pending.buffer is not None:
                self._down.give_back(pending.buffer)
            if error is not None and not unbacked:
                _log.error("tier.write_failed", path=str(self.file.path), error=str(error))
            if isinstance(pending.instruction, Write):
                self._perform(self.state.written(pending.instruction.entry, ok=error is None, pause=not unbacked))
            elif error is not None:
                self.state.counters.write_errors += 1
                if pending.final:
                    self._failed_wipe = number, error
        if unbacked:
            self._shrink(unbacked)
        self._num_done += len(batch)
        self._tell_settled()
        self._work()

    def _shrink(self, unbacked: Sequence[tuple[int, int]]) -> None:
        """Limit the tier to the space that the disk has given so far, and log that once."""
        self.state.retire(unbacked)
        if not self._has_shrunk:
            self._has_shrunk = True
            sizes = {"size_bytes": self.file.capacity_bytes, "now_bytes": self.state.capacity_bytes}
            _log.warning("tier.disk_full", path=str(self.file.path), **sizes, hint="make room and restart the node")

    def _tell_settled(self) -> None:
        while self._settling and self._settling[0][0] <= self._num_done:
            future = self._settling.pop(0)[1]
            if not future.done():
                future.set_result(None)

    async def settled(self, since: int, until_s: float) -> None:
        """Wait until all decisions so far are in the file, so that removed chunks stay removed after a restart.

        Raises NodeUnavailable if a chunk dropped after the first ``since`` of ``num_given`` may come back,
        DeadlineExceeded at ``until_s`` (the loop's time).
        """
        await self.performed(until_s)
        if self._failed_wipe is not None and self._failed_wipe[0] > since:
            error = self._failed_wipe[1]
            raise NodeUnavailable(f"the SSD tier could not forget a removed chunk ({error}); remove it again")

    async def performed(self, until_s: float) -> None:
        """Wait until all decisions so far were tried; raises DeadlineExceeded at ``until_s`` (the loop's time)."""
        if self._num_done == self.num_given:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._settling.append((self.num_given, future))
        try:
            async with asyncio.timeout_at(until_s):
                await future
        except TimeoutError:
            raise DeadlineExceeded("the SSD tier did not finish its writes before the deadline; try again") from None

    # --- up

    @asynccontextmanager
    async def reading(self, entry: SsdChunk, until_s: float) -> AsyncIterator[memoryview]:
        """Yield the verified value of ``entry``; valid inside the block, during which the entry's range is unchanged.

        Raises ChunkNotFound if it is gone or its bytes do not match, DeadlineExceeded at ``until_s``.
        """
        if entry.state is SsdChunkState.WRITING:
            await self.performed(until_s)
        if entry.state is not SsdChunkState.STORED:
            raise ChunkNotFound(f"{entry.key!r} is not in the SSD tier any more")
        self.state.begin_read(entry)
        try:
            buffer = await self._read_buffer(entry.range_bytes, until_s)
            try:
                yield await self._read(entry, buffer)
            finally:
                self._up.give_back(buffer)
                self._buffer_freed.set()
                self._buffer_freed.clear()
        finally:
            self.state.end_read(entry)

    async def _read_buffer(self, size_bytes: int, until_s: float) -> IoBuffer:
        while (buffer := self._up.take(size_bytes)) is None:
            try:
                async with asyncio.timeout_at(until_s):
                    await self._buffer_freed.wait()
            except TimeoutError:
                raise DeadlineExceeded("the SSD tier has too many reads in progress for this one; try again") from None
        return buffer

    async def _read(self, entry: SsdChunk, buffer: IoBuffer) -> memoryview:
        """Read without being cancelled with the caller: the thread fills the buffer until it is done."""
        read = asyncio.get_running_loop().run_in_executor(
            self._readers, partial(_read_one, self.file, entry.record, entry.offset, buffer.view)
        )
        try:
            sound = await _uninterrupted(read)
        except OSError as error:
            _log.error("tier.read_failed", key=entry.key, offset=entry.offset, error=str(error))
            self._perform(self.state.not_read(entry, corrupt=False))
            raise ChunkNotFound(f"{entry.key!r} could not be read from the SSD tier: {error}") from None
        self.state.counters.read_bytes += entry.range_bytes
        if not sound:
            _log.error("tier.corrupt", key=entry.key, offset=entry.offset, size_bytes=entry.size_bytes)
            self._perform(self.state.not_read(entry, corrupt=True))
            raise ChunkNotFound(
                f"the bytes of {entry.key!r} in the SSD tier did not match their checksums and have been dropped"
            )
        head = entry.record.head_bytes
        return buffer.view[head : head + entry.size_bytes]

    @property
    def queued_bytes(self) -> int:
        """Bytes queued for writing."""
        return self._down.used_bytes

    @property
    def free_queue_bytes(self) -> int:
        """Bytes that may be queued now."""
        return self._down.largest_free_bytes

    async def close(self) -> None:
        """Finish pending work, then close the file."""
        with contextlib.suppress(DeadlineExceeded):
            await self.performed(asyncio.get_running_loop().time() + CLOSE_DEADLINE_S)
        self._closed = True
        if self._batch is not None and not self._batch.done():
            await asyncio.wait([self._batch])  # the thread uses our buffers
        self._writer.shutdown()
        self._readers.shutdown()
        self._down.close()
        self._up.close()
        self.file.close()

    def check(self) -> None:
        """Assert the state's invariants, and that every WRITING entry has its bytes in a buffer."""
        self.state.check()
        writing = {p.instruction.entry for p in (*self._pending, *self._under_way) if isinstance(p.instruction, Write)}
        assert all(e in writing for e in self.state.entries() if e.state is SsdChunkState.WRITING)
        assert self.num_given - self._num_done == len(self._pending) + len(self._under_way)

    def __repr__(self) -> str:
        return f"SsdTier({self.file.path}, {self.state!r}, {len(self._pending) + len(self._under_way)} under way)"


async def _uninterrupted(future: asyncio.Future[bool]) -> bool:
    """Return the result of ``future``; a cancellation waits for it first, because a thread is using our memory."""
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        raise


def open_tier(
    place: SsdPlace,
    view: memoryview,
    admission: TierAdmission,
    make_policy: Callable[[], Policy],
    clock: Clock,
    on_lost: Callable[[SsdChunk], None],
) -> SsdTier:
    """Return a tier below ``view``, without its file's contents: ``recover`` them. Raises ConfigError."""
    file = TierFile(place.file, place.size_bytes)
    return SsdTier(file, TierState(file.capacity_bytes, make_policy, admission, clock), view, on_lost)


def _write_all(file: TierFile, batch: Sequence[_Pending], sync: bool) -> list[_Outcome]:
    """Perform ``batch`` in order; runs in the writing thread."""
    outcomes: list[_Outcome] = []
    for pending in batch:
        try:
            if pending.buffer is None:
                assert isinstance(pending.instruction, Wipe)
                file.wipe(pending.instruction.offset)
            else:
                assert isinstance(pending.instruction, Write)
                file.write(pending.instruction.entry.offset, pending.buffer.view)
            outcomes.append(None)
        except OSError as error:
            outcomes.append(error)
    if sync:
        try:
            file.sync()
        except OSError as error:
            outcomes = [outcome or error for outcome in outcomes]
    return outcomes


def _read_one(file: TierFile, record: SsdRecord, offset: int, view: memoryview) -> bool:
    """Read the record and return whether head and value are intact; runs in a thread."""
    file.read(offset, view)
    found = decode_head(view[: record.head_bytes], offset, file.file_id)
    if found is None or (found.key, found.version, found.size_bytes) != (record.key, record.version, record.size_bytes):
        return False
    return sums.matches(view[record.head_bytes : record.head_bytes + record.size_bytes], record.checksums)
