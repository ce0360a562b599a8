"""One chunk of a node: its states, the events that move it, and its data.

    RESERVED ----COMMIT------> ANNOUNCING --ACCEPTED/GAVE_UP--> LIVE
        | \\---COMMIT_UNSEEN------------------------------------^ |
        |                        |                               |
        +--------DROP------------+------------DROP---------------+--> CONDEMNED --LAST_LEASE_ENDED--> GONE

A chunk never changes its bytes. DROP stands for every reason to drop it (evicted, removed, expired, corrupt, refused by
the master, abandoned by its writer); the range itself is free only in GONE, when nobody can touch it any more.
"""

from __future__ import annotations

from enum import Enum
from functools import lru_cache
from typing import ClassVar, Self

import msgspec

from tanghulu.store.protocol.checksums import Checksums
from tanghulu.store.protocol.types import Pin, Tier
from tanghulu.types import ChunkKey


class ChunkState(Enum):
    """The states of a chunk; only LIVE ones are served."""

    #: A writer has the range; nobody else knows of it. Several reservations of one key may exist at once.
    RESERVED = "reserved"
    #: The bytes are in place and the master is being notified; its answer decides whether this put was the first.
    ANNOUNCING = "announcing"
    #: Served to everybody, and evictable while it has neither leases nor a hard pin.
    LIVE = "live"
    #: It cannot be found any more, but a peer may still touch its range.
    CONDEMNED = "condemned"
    #: Its range is free.
    GONE = "gone"

    __hash__ = object.__hash__  # see Pin


class ChunkEvent(Enum):
    """The events of a chunk."""

    COMMIT = "commit"
    COMMIT_UNSEEN = "commit without waiting for the master"
    ACCEPTED = "accepted by the master"
    GAVE_UP = "the putter stopped waiting for the master"
    DROP = "drop"
    LAST_LEASE_ENDED = "last lease ended"

    __hash__ = object.__hash__


_S, _E = ChunkState, ChunkEvent
TRANSITIONS: dict[tuple[ChunkState, ChunkEvent], ChunkState] = {
    (_S.RESERVED, _E.COMMIT): _S.ANNOUNCING,
    (_S.RESERVED, _E.COMMIT_UNSEEN): _S.LIVE,
    (_S.RESERVED, _E.DROP): _S.CONDEMNED,
    (_S.ANNOUNCING, _E.ACCEPTED): _S.LIVE,
    (_S.ANNOUNCING, _E.GAVE_UP): _S.LIVE,
    (_S.ANNOUNCING, _E.DROP): _S.CONDEMNED,
    (_S.LIVE, _E.ACCEPTED): _S.LIVE,
    (_S.LIVE, _E.GAVE_UP): _S.LIVE,
    (_S.LIVE, _E.DROP): _S.CONDEMNED,
    (_S.CONDEMNED, _E.LAST_LEASE_ENDED): _S.GONE,
}


def compact(checksums: Checksums) -> int | Checksums:
    """Return the form in which a chunk keeps its checksums: most have one over the value, and a million add up.

    Example: Checksums(0, (7,)) is 7, 136 bytes less; Checksums(4, (7, 8)) stays.
    """
    return checksums.parts[0] if checksums.part_bytes == 0 and len(checksums.parts) == 1 else checksums


_WORD = (1 << 64) - 1
_CHECKSUM_SHIFT = 64
_REST_SHIFT = 128
_REPLICAS_SHIFT = 2
_TIME_SHIFT = 9
_MAX_REPLICAS = (1 << (_TIME_SHIFT - _REPLICAS_SHIFT)) - 1
_PINS = tuple(Pin)
_PIN_NUMBERS = {pin: number for number, pin in enumerate(_PINS)}


class Chunk(msgspec.Struct, eq=False, gc=False):
    """One chunk; created by ``reserved``.

    ``num_leases`` counts the reservation or the pins on its range. ``replicas`` nodes should hold it, this one among
    them.

    A million of them exist at once, so rarely used data is one integer of 48 bytes where five objects would take three
    times as much: time in ms (from bit 137) | replicas (7 bits) | pin (2) | checksum (64) | version (64). Only a chunk
    without checksums, or with several, keeps a tuple (version, checksums, the rest). It refers to nothing that could
    refer to it, so no garbage collection visits it.
    """

    tier: ClassVar[Tier] = Tier.MEMORY

    key: ChunkKey
    offset: int
    size_bytes: int
    expires_s: float | None
    _facts: int | tuple[int, Checksums, int]
    state: ChunkState = ChunkState.RESERVED
    num_leases: int = 0
    num_hits: int = 0

    @classmethod
    def reserved(
        cls,
        key: ChunkKey,
        version: int,
        offset: int,
        size_bytes: int,
        compact_checksums: int | Checksums,
        pin: Pin,
        created_s: float,
        *,
        expires_s: float | None = None,
        replicas: int = 1,
    ) -> Self:
        """Return a chunk whose range is being written."""
        assert created_s >= 0, "monotonic clocks start at zero"
        rest = int(created_s * 1000) << _TIME_SHIFT | min(replicas, _MAX_REPLICAS) << _REPLICAS_SHIFT
        facts = _pack(version, compact_checksums, rest | _PIN_NUMBERS[pin])
        return cls(key, offset, _shared(size_bytes), expires_s, facts)

    @property
    def version(self) -> int:
        """The version of the put that made the chunk."""
        facts = self._facts
        return facts & _WORD if isinstance(facts, int) else facts[0]

    @property
    def pin(self) -> Pin:
        """The chunk's protection from eviction."""
        return _PINS[self._rest & 3]

    @property
    def replicas(self) -> int:
        """The number of nodes that should hold the chunk."""
        return self._rest >> _REPLICAS_SHIFT & _MAX_REPLICAS

    @property
    def created_s(self) -> float:
        """Time of its reservation, to the millisecond."""
        return (self._rest >> _TIME_SHIFT) / 1000

    @property
    def _rest(self) -> int:
        facts = self._facts
        return facts >> _REST_SHIFT if isinstance(facts, int) else facts[2]

    @property
    def compact_checksums(self) -> int | Checksums:
        """See ``compact``; the writer's own checksums until the bytes are in place."""
        facts = self._facts
        return facts >> _CHECKSUM_SHIFT & _WORD if isinstance(facts, int) else facts[1]

    @compact_checksums.setter
    def compact_checksums(self, value: int | Checksums) -> None:
        self._facts = _pack(self.version, value, self._rest)

    @property
    def checksums(self) -> Checksums:
        """The checksums of the value; empty until it is written."""
        compact_form = self.compact_checksums
        return Checksums(0, (compact_form,)) if isinstance(compact_form, int) else compact_form

    def __repr__(self) -> str:
        return f"Chunk({self.key!r}, {self.state.value}, [{self.offset}, +{self.size_bytes}), {self.num_leases} leases)"

    def step(self, event: ChunkEvent) -> ChunkState:
        """Apply ``event``; asserts that the table knows the pair."""
        following = TRANSITIONS.get((self.state, event))
        assert following is not None, f"chunk {self.key!r} cannot take {event.value!r} in {self.state.value}"
        self.state = following
        return following

    @property
    def held(self) -> bool:
        """Whether the node can serve it, or will once the master agrees."""
        return self.state is ChunkState.LIVE or self.state is ChunkState.ANNOUNCING

    @property
    def is_live(self) -> bool:
        """Whether it is in the order of evictions, unless it is hard-pinned."""
        return self.state is ChunkState.LIVE

    @property
    def range_bytes(self) -> int:
        """Its bytes in the segment, before rounding."""
        return self.size_bytes

    @property
    def evictable(self) -> bool:
        """Whether it may be dropped to make room now."""
        return self.state is ChunkState.LIVE and self.num_leases == 0 and self.pin is not Pin.HARD

    @property
    def is_loose(self) -> bool:
        """Whether it may be moved now: its range is used only through the node and the shared index."""
        return self.state is ChunkState.LIVE and self.num_leases == 0


@lru_cache(1024)
def _shared(size_bytes: int) -> int:
    """Return one int for all chunks of a size, of which KV has few: each message brings its own, 32 bytes."""
    return size_bytes


def _pack(version: int, checksums: int | Checksums, rest: int) -> int | tuple[int, Checksums, int]:
    if isinstance(checksums, int):
        return rest << _REST_SHIFT | checksums << _CHECKSUM_SHIFT | version
    return version, checksums, rest
