"""Slices, the unit that the engine posts to one path: their cutting, states and history. Pure.

A request of ``length`` bytes is cut into pieces of the transport's ``slice_bytes``; a last piece shorter than half of
that is merged into the one before it, because even a short slice costs a whole reply. Example with 1 MiB: 2.25 MiB -> 1
+ 1.25.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import NamedTuple

from tanghulu.transfer_engine.core.buffers import Buffer
from tanghulu.transfer_engine.core.paths import Capability, Path


class Opcode(IntEnum):
    """Direction of a transfer as the caller sees it; the value travels on the wire."""

    #: From the segment into the caller's buffer.
    READ = 1
    #: From the caller's buffer into the segment.
    WRITE = 2


class SliceState(Enum):
    """State of a slice."""

    #: Not on any path: fresh, or to be retried.
    WAITING = "waiting"
    #: Given to a path; its bytes may be moving.
    POSTED = "posted"
    #: All its bytes have arrived.
    DONE = "done"
    #: Refused by the peer, or lost on as many paths as it was allowed to try.
    FAILED = "failed"
    #: Given up because its request failed, was cancelled or ran out of time.
    CANCELLED = "cancelled"


class SliceEvent(Enum):
    """Event in the life of a slice."""

    POST = "post"
    ARRIVED = "arrived"
    LOST = "lost"
    #: It arrived with wrong bytes: by its checksum, or by that of its whole request.
    CORRUPT = "corrupt"
    REFUSED = "refused"
    EXHAUSTED = "exhausted"
    CANCEL = "cancel"


TRANSITIONS: dict[tuple[SliceState, SliceEvent], SliceState] = {
    (SliceState.WAITING, SliceEvent.POST): SliceState.POSTED,
    (SliceState.WAITING, SliceEvent.EXHAUSTED): SliceState.FAILED,
    (SliceState.WAITING, SliceEvent.CANCEL): SliceState.CANCELLED,
    (SliceState.POSTED, SliceEvent.ARRIVED): SliceState.DONE,
    (SliceState.POSTED, SliceEvent.LOST): SliceState.WAITING,
    (SliceState.POSTED, SliceEvent.CORRUPT): SliceState.WAITING,
    (SliceState.DONE, SliceEvent.CORRUPT): SliceState.WAITING,
    (SliceState.POSTED, SliceEvent.REFUSED): SliceState.FAILED,
    (SliceState.POSTED, SliceEvent.CANCEL): SliceState.CANCELLED,
}


class Notice(NamedTuple):
    """Message to the segment's owner when a request's bytes have arrived; ``number`` is unique and not 0."""

    number: int
    data: bytes


@dataclass(slots=True, eq=False)
class Slice:
    """One piece of one request; offsets are absolute in the local buffer and in the remote segment.

    ``verified``: both ends compare checksums after arrival. With a ``notice`` (a WRITE in direction) it moves that and
    nothing else.
    """

    slice_id: int
    request_index: int
    opcode: Opcode
    buffer: Buffer
    local_offset: int
    remote_offset: int
    length: int
    lease_id: int
    verified: bool = False
    notice: Notice | None = None
    state: SliceState = SliceState.WAITING
    path: Path | None = None
    num_posts: int = 0
    posted_s: float = 0.0
    num_corrupt: int = 0
    lost_on: list[Path] = field(default_factory=list)
    #: (seconds, event, the path on which it happened, message of the peer or the path), oldest first.
    events: list[tuple[float, SliceEvent, Path | None, str]] = field(default_factory=list)

    def step(self, event: SliceEvent, now_s: float, note: str = "") -> SliceState:
        """Apply ``event``; asserts that the pair is in the table."""
        following = TRANSITIONS.get((self.state, event))
        assert following is not None, f"slice {self.slice_id} cannot take {event.value} in {self.state.value}"
        self.events.append((now_s, event, self.path, note))
        self.state = following
        return following

    @property
    def needs(self) -> Capability:
        """Capability that the slice requires of its path."""
        return Capability.DATA if self.notice is None else Capability.NOTICE

    def memory(self) -> memoryview:
        """Return the local bytes: a READ's destination, a WRITE's source."""
        return self.buffer.view(self.local_offset, self.length)


def cut(length: int, slice_bytes: int) -> Iterator[tuple[int, int]]:
    """Return (offset, length) of the pieces of ``length`` bytes, in order, the short tail merged."""
    num_pieces = max(1, (length + slice_bytes // 2) // slice_bytes)
    for index in range(num_pieces):
        start = index * slice_bytes
        yield start, (length - start if index == num_pieces - 1 else slice_bytes)
