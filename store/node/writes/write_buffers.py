"""The desks of a node: who gets one, what is taken out of them, when their memory is free again.

The layout is that of ``store.protocol.write_buffer``.

    OPEN ----CLOSE----> CLOSING ----QUIET----> CLOSED ----LEFT----> GONE
      |                    |                      |                  ^
      +-------EXITED-------+--------EXITED--------+------EXITED------+

A desk's range is taken from the allocator as a whole. A record that is taken out makes a chunk of a part of it; what no
chunk has got is freed when the client cannot write there any more: closed and quiet, or its process gone. Closed are
desks that were idle, desks that their client has left, those of lost sessions, and all of them while the node drains
or a put waits for room.

The master has accepted a published record already (see ``proclaimed``).

Pure but for the shared memory that it reads: no socket, no sleep; times come in.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import structlog

from tanghulu.auth.tenants import tenant_of
from tanghulu.errors import InvalidRequest
from tanghulu.store.node.state.chunk import Chunk
from tanghulu.store.node.state.holdings import Holding
from tanghulu.store.node.state.outcomes import EvictionReason
from tanghulu.store.node.state.proclaimed import commit_proclaimed
from tanghulu.store.protocol.types import validate_key
from tanghulu.store.protocol.write_buffer import (
    ALIGNMENT,
    GRACE_S,
    HEAD_BYTES,
    RECORD_BYTES,
    DeskPlace,
    DeskReader,
    Record,
)

if TYPE_CHECKING:
    from tanghulu.rpc.fast_server import Handler
    from tanghulu.store.node.state.node_state import NodeState

_log = structlog.get_logger(__name__)

#: Heads at once: clients that have a desk, or have not said that they left their last one.
NUM_HEADS = 1024
#: Desks that hold memory, all clients together, and desks of one client that are not GONE.
MAX_DESKS = 32
MAX_PER_SESSION = 4
#: A desk has room for so many values of the size that its client names or for the second in bytes, whichever is more;
#: where memory is short for so many at least.
VALUES_PER_DESK = 64
USUAL_BYTES = 1 << 20
MIN_VALUES = 4
NUM_RECORDS = 256
RING_BYTES = NUM_RECORDS * RECORD_BYTES
#: What a node keeps behind its chunks for heads and records.
AREA_BYTES = NUM_HEADS * HEAD_BYTES + MAX_DESKS * RING_BYTES
#: Of the node's memory, what one desk and what all of them may take.
ONE_FRACTION = 1 / 32
ALL_FRACTION = 1 / 8
#: A desk without new records for so long is closed.
IDLE_S = 2.0


class DeskState(Enum):
    """Where a desk stands."""

    #: The client puts values there.
    OPEN = "open"
    #: No use may begin; those that were begun have not ended, or not for certain.
    CLOSING = "closing"
    #: Its range is chunks and free memory; the client may still look at the head.
    CLOSED = "closed"
    #: Nobody will look at the head again.
    GONE = "gone"

    __hash__ = object.__hash__  # see Pin


class DeskEvent(Enum):
    """What happens to a desk."""

    CLOSE = "the node wants its memory back, or the client has left"
    QUIET = "no use is open, nor can begin"
    LEFT = "the client looks at it no more"
    EXITED = "the client's process has ended"

    __hash__ = object.__hash__


_S, _E = DeskState, DeskEvent
TRANSITIONS: dict[tuple[DeskState, DeskEvent], DeskState] = {
    (_S.OPEN, _E.CLOSE): _S.CLOSING,
    (_S.CLOSING, _E.QUIET): _S.CLOSED,
    (_S.CLOSED, _E.LEFT): _S.GONE,
    (_S.OPEN, _E.EXITED): _S.GONE,
    (_S.CLOSING, _E.EXITED): _S.GONE,
    (_S.CLOSED, _E.EXITED): _S.GONE,
}


@dataclass(eq=False, slots=True)
class _Desk:
    session_id: int
    place: DeskPlace
    reader: DeskReader
    key_scope: str
    busy_s: float  # when records came last
    state: DeskState = DeskState.OPEN
    closed_s: float = 0.0
    taken: list[tuple[int, int]] = field(default_factory=list)  # parts that became chunks, (offset, end) in order

    def step(self, event: DeskEvent) -> None:
        following = TRANSITIONS.get((self.state, event))
        assert following is not None, f"a desk cannot take {event.value!r} in {self.state.value}"
        self.state = following

    def covers(self, offset: int, end: int) -> bool:
        """Whether the part overlaps one that became a chunk."""
        where = bisect_left(self.taken, (offset, 0))
        before_ends = self.taken[where - 1][1] if where else 0
        return before_ends > offset or (where < len(self.taken) and self.taken[where][0] < end)

    def rest(self) -> Iterator[tuple[int, int]]:
        """(offset, bytes) of what no chunk has got."""
        position, end = self.place.offset, self.place.offset + self.place.length
        for start, stop in [*self.taken, (end, end)]:
            assert start >= position, "parts of a desk do not overlap"
            if start > position:
                yield position, start - position
            position = stop


class Desks:
    """See the module. ``area``: where ``memory`` has AREA_BYTES for them. ``on_displaced`` hears of what gave way."""

    def __init__(
        self,
        state: NodeState,
        memory: memoryview,
        area: int,
        now_s: Callable[[], float],
        on_displaced: Callable[[Holding], None],
    ) -> None:
        self._state = state
        self._memory = memory
        self._free_heads = [area + number * HEAD_BYTES for number in range(NUM_HEADS - 1, -1, -1)]
        rings = area + NUM_HEADS * HEAD_BYTES
        self._free_rings = [rings + number * RING_BYTES for number in range(MAX_DESKS - 1, -1, -1)]
        self._now_s = now_s
        self._on_displaced = on_displaced
        self._open: list[_Desk] = []  # OPEN and CLOSING ones
        self._closed: list[_Desk] = []
        self._bytes = 0
        self.num_taken = self.bytes_taken = 0

    @property
    def num_open(self) -> int:
        """Desks that may bring chunks yet."""
        return len(self._open)

    @property
    def num_heads(self) -> int:
        """Desks that clients may still look at."""
        return NUM_HEADS - len(self._free_heads)

    # --- giving

    def grant(self, session_id: int, value_bytes: int, key_scope: str = "") -> DeskPlace | None:
        """A desk for values of about that size; None: no memory to spare, or somebody waits for it.

        ``key_scope`` stands in front of all keys that its client writes: its tenant's.
        """
        self.tick(self._now_s())  # its last desk may be left
        state = self._state
        num_mine = sum(1 for desk in (*self._open, *self._closed) if desk.session_id == session_id)
        if state.draining or len(state.waiters) or not self._free_heads:
            return None
        if num_mine >= MAX_PER_SESSION or len(self._open) >= MAX_DESKS:
            return None
        if state.table.book is not None and state.table.book.limit_of(tenant_of(key_scope)):
            return None  # what it writes there would count only when it is there
        one_value = _rounded(value_bytes)
        wanted = min(max(VALUES_PER_DESK * one_value, USUAL_BYTES), int(state.capacity_bytes * ONE_FRACTION))
        found = self._take_range(wanted, MIN_VALUES * one_value)
        if found is None:
            return None
        offset, length = found
        place = DeskPlace(self._free_heads.pop(), self._free_rings.pop(), NUM_RECORDS, offset, length)
        self._open.append(_Desk(session_id, place, DeskReader(self._memory, place), key_scope, self._now_s()))
        self._bytes += length
        return place

    def _take_range(self, wanted: int, least: int) -> tuple[int, int] | None:
        """(offset, bytes) of a range of at most ``wanted`` bytes; the oldest chunks give way, but none in vain."""
        room = self._state.room
        wanted = wanted // ALIGNMENT * ALIGNMENT
        if wanted < least or self._bytes + wanted > self._state.capacity_bytes * ALL_FRACTION:
            return None
        allocator = room.allocator
        missing = min(wanted - allocator.largest_free_bytes, 2 * wanted - allocator.free_bytes)
        if missing > self._state.tier.free_queue_bytes:
            missing = 0  # not all of them would go down; the watermarks make room at the disk's pace
        for chunk in room.oldest(missing):  # enough is free in the end; it may be scattered, then there is no desk
            self._state.evict(chunk, EvictionReason.DESK)
        length = min(wanted, allocator.largest_free_bytes)
        offset = allocator.allocate(length) if length >= least else None
        return None if offset is None else (offset, length)

    # --- taking

    def drain(self) -> int:
        """Make chunks of what was published; how many records there were."""
        num_before = self.num_taken
        for desk in self._open:
            if desk.reader.fresh:
                self._drain(desk)
        return self.num_taken - num_before

    def _drain(self, desk: _Desk) -> None:
        desk.busy_s = now_s = self._now_s()
        for record in desk.reader.take() if desk.reader.sound else (None,):
            if record is None or not self._adopt(desk, record, now_s):
                if desk.state is DeskState.OPEN:
                    _log.error("desk.bad_record", session=desk.session_id, record=desk.reader.taken)
                    self._close(desk)
                return
            self.num_taken += 1
            self.bytes_taken += record.size_bytes

    def _adopt(self, desk: _Desk, record: Record, now_s: float) -> bool:
        """Make a chunk of one value; False for a record that no client writes."""
        key, version, place, size, checksum, pin, ttl_ms = record
        offset = desk.place.offset + place
        end = offset + _rounded(size)
        if not size or place % ALIGNMENT or end > desk.place.offset + desk.place.length or desk.covers(offset, end):
            return False
        try:
            name = validate_key(desk.key_scope + key)
        except InvalidRequest:
            return False
        insort(desk.taken, (offset, end))
        expires_s = now_s + ttl_ms / 1000 if ttl_ms else None
        self._commit(Chunk(name, version, offset, size, checksum, pin, now_s, expires_s))
        return True

    def _commit(self, chunk: Chunk) -> None:
        self._state.table.enter(chunk)
        commit_proclaimed(self._state, chunk, chunk.checksums, self._on_displaced)

    # --- closing

    def tick(self, now_s: float) -> int:
        """Take what is new, close what is idle or left, free what is quiet; how many records there were."""
        num_records = self.drain()
        unwanted = self._state.draining or len(self._state.waiters) > 0
        for desk in list(self._open):
            idle = now_s - desk.busy_s > IDLE_S
            left = desk.reader.left  # which its client says when all uses have ended
            if desk.state is DeskState.OPEN and (unwanted or idle or left):
                self._close(desk)
            if desk.state is DeskState.CLOSING and (left or self._is_quiet(desk, now_s)):
                self._drain(desk)
                desk.step(DeskEvent.QUIET)
                self._free_range(desk)
                self._closed.append(desk)
        for desk in [desk for desk in self._closed if desk.reader.left]:
            desk.step(DeskEvent.LEFT)
            self._forget(desk)
        return num_records

    def _is_quiet(self, desk: _Desk, now_s: float) -> bool:
        return now_s - desk.closed_s > GRACE_S and desk.reader.quiet

    def _close(self, desk: _Desk) -> None:
        desk.step(DeskEvent.CLOSE)
        desk.closed_s = self._now_s()
        desk.reader.close()

    def session_closed(self, session_id: int) -> None:
        """The session's connections are gone."""
        self.drain()
        for desk in self._open:
            if desk.session_id == session_id and desk.state is DeskState.OPEN:
                self._close(desk)

    def session_exited(self, session_id: int) -> None:
        """The session's process has ended: nobody writes there any more."""
        self.drain()
        for desk in [desk for desk in (*self._open, *self._closed) if desk.session_id == session_id]:
            if desk.state is not DeskState.CLOSED:
                self._free_range(desk)
                self._closed.append(desk)
            desk.step(DeskEvent.EXITED)
            self._forget(desk)

    def _free_range(self, desk: _Desk) -> None:
        self._open.remove(desk)
        self._bytes -= desk.place.length
        self._free_rings.append(desk.place.records)
        for offset, length in desk.rest():
            self._state.room.allocator.free(offset, length)

    def _forget(self, desk: _Desk) -> None:
        self._closed.remove(desk)
        self._free_heads.append(desk.place.head)

    # --- questions

    def knows(self, session_id: int) -> bool:
        """Whether something still depends on the end of the session's process."""
        return any(desk.session_id == session_id for desk in (*self._open, *self._closed))

    def ranges(self) -> Iterator[tuple[int, int]]:
        """(offset, bytes) of what is neither free nor a chunk's."""
        for desk in self._open:
            yield from desk.rest()

    def check(self) -> None:
        """Assert that heads and bytes are counted, and that parts lie inside their desks."""
        assert len(self._free_heads) + len(self._open) + len(self._closed) == NUM_HEADS
        assert len(self._free_rings) + len(self._open) == MAX_DESKS
        assert self._bytes == sum(desk.place.length for desk in self._open)
        assert self._bytes <= self._state.capacity_bytes * ALL_FRACTION
        for desk in self._open:
            assert desk.state in (DeskState.OPEN, DeskState.CLOSING)
            taken = sum(end - start for start, end in desk.taken)
            assert taken + sum(length for _, length in desk.rest()) == desk.place.length
        assert all(desk.state is DeskState.CLOSED for desk in self._closed)

    def __repr__(self) -> str:
        return f"Desks({len(self._open)} open, {len(self._closed)} closed, {self.num_taken} records)"


def _rounded(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


def after_drain(state: NodeState, handler: Handler) -> Handler:
    """``handler``, of a node whose answers depend on what it holds: what was published counts as held."""

    def handled(peer: Any, request: Any, attachment: memoryview) -> Any:
        state.desks.drain()
        return handler(peer, request, attachment)

    return handled
