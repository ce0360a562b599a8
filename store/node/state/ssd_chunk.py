"""One chunk in a node's SSD tier: its states, the events that move it, and its data.

    WRITING --WRITTEN--> STORED
       |                   |
       +-------DROP--------+--> DOOMED --LAST_READER_LEFT--> GONE

DROP stands for every reason to drop it (evicted from the tier, removed, expired, corrupt, not written, superseded). Its
range may be reused in GONE, by a write performed behind the wipe of its head.
"""

from __future__ import annotations

from enum import Enum
from typing import ClassVar

import msgspec

from tanghulu.store.node.state.ssd_record import SsdRecord
from tanghulu.store.protocol.checksums import Checksums
from tanghulu.store.protocol.types import Pin, Tier
from tanghulu.types import ChunkKey


class SsdChunkState(Enum):
    """The states of an entry; WRITING and STORED ones can be found."""

    #: Its bytes are being written to the file.
    WRITING = "writing"
    #: Its bytes are in the file.
    STORED = "stored"
    #: It cannot be found any more, but a read of its range is in progress.
    DOOMED = "doomed"
    #: Its range is free.
    GONE = "gone"

    __hash__ = object.__hash__  # see Pin


class SsdChunkEvent(Enum):
    """The events of an entry."""

    WRITTEN = "written"
    DROP = "drop"
    LAST_READER_LEFT = "last reader left"

    __hash__ = object.__hash__


_S, _E = SsdChunkState, SsdChunkEvent
TRANSITIONS: dict[tuple[SsdChunkState, SsdChunkEvent], SsdChunkState] = {
    (_S.WRITING, _E.WRITTEN): _S.STORED,
    (_S.WRITING, _E.DROP): _S.DOOMED,
    (_S.STORED, _E.DROP): _S.DOOMED,
    (_S.DOOMED, _E.LAST_READER_LEFT): _S.GONE,
}


class SsdChunk(msgspec.Struct, eq=False, gc=False):
    """One chunk in a node's file. ``expires_s``: on the node's monotonic clock.

    There may be many million: it refers to nothing that could refer to it, so no garbage collection visits it.
    """

    tier: ClassVar[Tier] = Tier.SSD

    record: SsdRecord
    offset: int
    expires_s: float | None
    state: SsdChunkState = SsdChunkState.WRITING
    num_readers: int = 0
    range_bytes: int = 0  # its bytes in the file

    def __post_init__(self) -> None:
        self.range_bytes = self.record.record_bytes

    @property
    def key(self) -> ChunkKey:
        """The chunk's key."""
        return self.record.key

    @property
    def version(self) -> int:
        """The version of the put that made the chunk."""
        return self.record.version

    @property
    def size_bytes(self) -> int:
        """Size of the value."""
        return self.record.size_bytes

    @property
    def checksums(self) -> Checksums:
        """Checksums of the value."""
        return self.record.checksums

    @property
    def pin(self) -> Pin:
        """The chunk's protection from eviction."""
        return self.record.pin

    @property
    def replicas(self) -> int:
        """Number of nodes that should hold it, this one among them."""
        return self.record.replicas

    @property
    def held(self) -> bool:
        """Whether the node can serve it."""
        return self.state is SsdChunkState.WRITING or self.state is SsdChunkState.STORED

    @property
    def is_live(self) -> bool:
        """Whether it is in the order of evictions, unless it is hard-pinned."""
        return self.held

    @property
    def evictable(self) -> bool:
        """Whether it may be dropped to make room now."""
        return self.state is SsdChunkState.STORED and self.num_readers == 0 and self.pin is not Pin.HARD

    @property
    def is_loose(self) -> bool:
        """Whether it may be dropped to clear a window."""
        return self.evictable and self.pin is Pin.NONE

    def step(self, event: SsdChunkEvent) -> SsdChunkState:
        """Apply ``event``; asserts that the table knows the pair."""
        following = TRANSITIONS.get((self.state, event))
        assert following is not None, f"entry {self.key!r} cannot take {event.value!r} in {self.state.value}"
        self.state = following
        return following
