"""The write buffers of a node: their granting, the reading of their records, and the release of their memory.

The layout is that of ``store.protocol.write_buffer``.

    OPEN ----CLOSE----> CLOSING ----QUIET----> CLOSED ----LEFT----> GONE
      |                    |                      |                  ^
      +-------EXITED-------+--------EXITED--------+------EXITED------+

A write buffer is a reservation in advance. Its range is taken from the allocator as a whole. A record read from it
makes a chunk of a part of it, which its client has committed at the master already; parts without a chunk are freed
when the client cannot write there any more: closed and quiet, or its process gone. Write buffers are closed when idle,
when their client has left them, when their session is lost, and all of them while the node drains or a put waits for
room.

Chunks are returned for ``NodeState`` to enter and commit. Pure except for reading the shared memory: no socket, no
sleep.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

import structlog

from tanghulu.auth.tenants import is_kv
from tanghulu.errors import InvalidRequest
from tanghulu.runtime.clock import Clock
from tanghulu.store.node.space.allocator import OffsetAllocator
from tanghulu.store.node.state.chunk import Chunk
from tanghulu.store.protocol.types import validate_key
from tanghulu.store.protocol.write_buffer import (
    ALIGNMENT,
    GRACE_S,
    HEAD_BYTES,
    RECORD_BYTES,
    BufferPlace,
    BufferReader,
    Record,
)

_log = structlog.get_logger(__name__)

#: Concurrent heads: of clients that have a write buffer, or have not reported leaving their last one.
NUM_HEADS = 1024
#: Write buffers that hold memory, all clients together, and those of one client that are not GONE.
MAX_BUFFERS = 32
MAX_PER_SESSION = 4
#: A write buffer has room for this many values of the size named by its client, or for the second in bytes if that is
#: more; if memory is short, for at least this many.
VALUES_PER_BUFFER = 64
USUAL_BYTES = 1 << 20
MIN_VALUES = 4
NUM_RECORDS = 256
RING_BYTES = NUM_RECORDS * RECORD_BYTES
#: Bytes kept by a node behind its chunks for heads and records.
AREA_BYTES = NUM_HEADS * HEAD_BYTES + MAX_BUFFERS * RING_BYTES
#: Part of the node's memory for one write buffer and for all of them.
ONE_FRACTION = 1 / 32
ALL_FRACTION = 1 / 8
#: A write buffer without new records for this time is closed.
IDLE_S = 2.0


class WriteBufferState(Enum):
    """The states of a write buffer."""

    #: The client puts values there.
    OPEN = "open"
    #: No use may begin; current ones have not ended, or not for certain.
    CLOSING = "closing"
    #: Its range is chunks and free memory; the client may still read the head.
    CLOSED = "closed"
    #: The head is not read any more.
    GONE = "gone"

    __hash__ = object.__hash__  # see Pin


class WriteBufferEvent(Enum):
    """The events of a write buffer."""

    CLOSE = "the node wants its memory back, or the client has left"
    QUIET = "no use is open, nor can begin"
    LEFT = "the client looks at it no more"
    EXITED = "the client's process has ended"

    __hash__ = object.__hash__


_S, _E = WriteBufferState, WriteBufferEvent
TRANSITIONS: dict[tuple[WriteBufferState, WriteBufferEvent], WriteBufferState] = {
    (_S.OPEN, _E.CLOSE): _S.CLOSING,
    (_S.CLOSING, _E.QUIET): _S.CLOSED,
    (_S.CLOSED, _E.LEFT): _S.GONE,
    (_S.OPEN, _E.EXITED): _S.GONE,
    (_S.CLOSING, _E.EXITED): _S.GONE,
    (_S.CLOSED, _E.EXITED): _S.GONE,
}


@dataclass(eq=False, slots=True)
class _WriteBuffer:
    session_id: int
    place: BufferPlace
    reader: BufferReader
    key_scope: str
    puts_kv: bool
    busy_s: float  # time of the last records
    state: WriteBufferState = WriteBufferState.OPEN
    closed_s: float = 0.0
    num_ended: int = 0  # the last state seen while CLOSING, and since when
    ended_s: float = 0.0
    taken: list[tuple[int, int]] = field(default_factory=list)  # parts that became chunks, (offset, end) in order

    def step(self, event: WriteBufferEvent) -> None:
        following = TRANSITIONS.get((self.state, event))
        assert following is not None, f"a write buffer cannot take {event.value!r} in {self.state.value}"
        self.state = following

    def covers(self, offset: int, end: int) -> bool:
        """Return whether the part overlaps one that became a chunk."""
        where = bisect_left(self.taken, (offset, 0))
        before_ends = self.taken[where - 1][1] if where else 0
        return before_ends > offset or (where < len(self.taken) and self.taken[where][0] < end)

    def rest(self) -> Iterator[tuple[int, int]]:
        """Yield (offset, bytes) of the parts without a chunk."""
        position, end = self.place.offset, self.place.offset + self.place.length
        for start, stop in [*self.taken, (end, end)]:
            assert start >= position, "parts of a write buffer do not overlap"
            if start > position:
                yield position, start - position
            position = stop


class WriteBuffers:
    """See the module. ``allocator`` is the node's.

    ``area``: the position in ``memory`` of AREA_BYTES for heads and records; None: nobody maps it, so nobody gets a
    buffer.
    """

    def __init__(self, allocator: OffsetAllocator, clock: Clock, memory: memoryview, area: int | None) -> None:
        self._allocator = allocator
        self._memory = memory
        self._num_heads, num_rings = (0, 0) if area is None else (NUM_HEADS, MAX_BUFFERS)
        heads = area or 0
        self._free_heads = [heads + number * HEAD_BYTES for number in range(self._num_heads - 1, -1, -1)]
        rings = heads + NUM_HEADS * HEAD_BYTES
        self._free_rings = [rings + number * RING_BYTES for number in range(num_rings - 1, -1, -1)]
        self._clock = clock
        self._open: list[_WriteBuffer] = []  # OPEN and CLOSING ones
        self._closed: list[_WriteBuffer] = []
        self._bytes = 0
        self.num_taken = self.bytes_taken = 0

    @property
    def num_open(self) -> int:
        """Write buffers that may still bring chunks."""
        return len(self._open)

    @property
    def num_heads(self) -> int:
        """Write buffers that clients may still read."""
        return self._num_heads - len(self._free_heads)

    # --- giving

    def wanted(self, session_id: int, value_bytes: int) -> tuple[int, int] | None:
        """Return (bytes, minimum bytes) of a write buffer for values of about that size; None for no buffer."""
        num_mine = sum(1 for each in (*self._open, *self._closed) if each.session_id == session_id)
        if not (self._free_heads and self._free_rings) or num_mine >= MAX_PER_SESSION:
            return None
        capacity_bytes, one_value = self._allocator.capacity_bytes, _rounded(value_bytes)
        wanted = min(max(VALUES_PER_BUFFER * one_value, USUAL_BYTES), int(capacity_bytes * ONE_FRACTION))
        wanted, least = wanted // ALIGNMENT * ALIGNMENT, MIN_VALUES * one_value
        if wanted < least or self._bytes + wanted > capacity_bytes * ALL_FRACTION:
            return None
        return wanted, least

    def open(self, session_id: int, offset: int, length: int, key_scope: str, puts_kv: bool = True) -> BufferPlace:
        """Lend a range taken from the allocator.

        ``key_scope`` is the prefix of all keys written by its client: its tenant's. Unless it ``puts_kv``, it must not
        write keys of KV.
        """
        place = BufferPlace(self._free_heads.pop(), self._free_rings.pop(), NUM_RECORDS, offset, length)
        reader = BufferReader(self._memory, place)
        self._open.append(_WriteBuffer(session_id, place, reader, key_scope, puts_kv, self._clock.now_s()))
        self._bytes += length
        return place

    # --- taking

    def drain(self) -> list[Chunk]:
        """Return chunks of the values published since the last call."""
        chunks: list[Chunk] = []
        for buffer in self._open:
            if buffer.reader.fresh:
                self._drain(buffer, chunks)
        return chunks

    def _drain(self, buffer: _WriteBuffer, chunks: list[Chunk]) -> None:
        buffer.busy_s = now_s = self._clock.now_s()
        for record in buffer.reader.take() if buffer.reader.sound else (None,):
            chunk = None if record is None else _cut(buffer, record, now_s)
            if chunk is None:
                if buffer.state is WriteBufferState.OPEN:
                    _log.error("write_buffer.bad_record", session=buffer.session_id, record=buffer.reader.taken)
                    self._close(buffer)
                return
            chunks.append(chunk)
            self.num_taken += 1
            self.bytes_taken += chunk.size_bytes

    # --- closing

    def tick(self, now_s: float, *, unwanted: bool) -> list[Chunk]:
        """Take new records, close idle or left buffers, or all if ``unwanted``, and free quiet ones."""
        chunks = self.drain()
        for buffer in list(self._open):
            idle = now_s - buffer.busy_s > IDLE_S
            left = buffer.reader.left  # which its client reports when all uses have ended
            if buffer.state is WriteBufferState.OPEN and (unwanted or idle or left):
                self._close(buffer)
            if buffer.state is WriteBufferState.CLOSING and (buffer.reader.complete or self._is_quiet(buffer, now_s)):
                self._drain(buffer, chunks)
                buffer.step(WriteBufferEvent.QUIET)
                self._free_range(buffer)
                self._closed.append(buffer)
        for buffer in [each for each in self._closed if each.reader.left]:
            buffer.step(WriteBufferEvent.LEFT)
            self._forget(buffer)
        return chunks

    def _is_quiet(self, buffer: _WriteBuffer, now_s: float) -> bool:
        num_ended = buffer.reader.num_ended
        if num_ended != buffer.num_ended:  # earlier records may be seen only later
            buffer.num_ended, buffer.ended_s = num_ended, now_s
        return now_s - max(buffer.closed_s, buffer.ended_s) > GRACE_S and buffer.reader.quiet

    def _close(self, buffer: _WriteBuffer) -> None:
        buffer.step(WriteBufferEvent.CLOSE)
        buffer.closed_s = buffer.ended_s = self._clock.now_s()
        buffer.num_ended = buffer.reader.num_ended
        buffer.reader.close()

    def session_closed(self, session_id: int) -> list[Chunk]:
        """Close the buffers of a session whose connections are gone."""
        chunks = self.drain()
        for buffer in self._open:
            if buffer.session_id == session_id and buffer.state is WriteBufferState.OPEN:
                self._close(buffer)
        return chunks

    def session_exited(self, session_id: int) -> list[Chunk]:
        """Release the buffers of a session whose process has ended: nobody writes there any more."""
        chunks = self.drain()
        for buffer in [each for each in (*self._open, *self._closed) if each.session_id == session_id]:
            if buffer.state is not WriteBufferState.CLOSED:
                self._free_range(buffer)
                self._closed.append(buffer)
            buffer.step(WriteBufferEvent.EXITED)
            self._forget(buffer)
        return chunks

    def _free_range(self, buffer: _WriteBuffer) -> None:
        self._open.remove(buffer)
        self._bytes -= buffer.place.length
        self._free_rings.append(buffer.place.records)
        for offset, length in buffer.rest():
            self._allocator.free(offset, length)

    def _forget(self, buffer: _WriteBuffer) -> None:
        self._closed.remove(buffer)
        self._free_heads.append(buffer.place.head)

    # --- questions

    def knows(self, session_id: int) -> bool:
        """Return whether something still depends on the end of the session's process."""
        return any(buffer.session_id == session_id for buffer in (*self._open, *self._closed))

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield (offset, bytes) of all parts that are neither free nor a chunk's."""
        for buffer in self._open:
            yield from buffer.rest()

    def check(self) -> None:
        """Assert that heads and bytes are counted, and that parts lie inside their buffers."""
        assert len(self._free_heads) + len(self._open) + len(self._closed) == self._num_heads
        assert len(self._free_rings) + len(self._open) == (MAX_BUFFERS if self._num_heads else 0)
        assert self._bytes == sum(buffer.place.length for buffer in self._open)
        assert self._bytes <= self._allocator.capacity_bytes * ALL_FRACTION
        for buffer in self._open:
            assert buffer.state in (WriteBufferState.OPEN, WriteBufferState.CLOSING)
            taken = sum(end - start for start, end in buffer.taken)
            assert taken + sum(length for _, length in buffer.rest()) == buffer.place.length
        assert all(buffer.state is WriteBufferState.CLOSED for buffer in self._closed)

    def __repr__(self) -> str:
        return f"WriteBuffers({len(self._open)} open, {len(self._closed)} closed, {self.num_taken} records)"


def _rounded(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


def _cut(buffer: _WriteBuffer, record: Record, now_s: float) -> Chunk | None:
    """Return a reserved chunk of one value; None for a record that no client writes."""
    key, version, place, size, checksum, pin, ttl_ms = record
    offset = buffer.place.offset + place
    end = offset + _rounded(size)
    if not buffer.puts_kv and is_kv(key):
        return None
    if not size or place % ALIGNMENT or end > buffer.place.offset + buffer.place.length or buffer.covers(offset, end):
        return None
    try:
        name = validate_key(buffer.key_scope + key)
    except InvalidRequest:
        return None
    insort(buffer.taken, (offset, end))
    expires_s = now_s + ttl_ms / 1000 if ttl_ms else None
    return Chunk.reserved(name, version, offset, size, checksum, pin, now_s, expires_s=expires_s)
