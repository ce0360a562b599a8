"""What a get wants: one key each, with what is known so far of its holders and of what stood in the way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from tanghulu.errors import ChecksumMismatch, ChunkNotFound, InvalidRequest, TanghuluError
from tanghulu.store.client.chunk import Chunk
from tanghulu.store.client.logic.effects import PeerId
from tanghulu.store.protocol.messages import Found
from tanghulu.transfer_engine.core.buffers import Buffer


class Range(NamedTuple):
    """A part of a value; ``length`` None: up to its end."""

    offset: int
    length: int | None


@dataclass(slots=True)
class Want:
    """One key to read: into ``buffer``, or into a Chunk where that is None. Done when ``result`` is set.

    ``part`` None: all of the value.
    """

    key: str
    buffer: Buffer | None = None
    part: Range | None = None
    holders: list[PeerId] = field(default_factory=list)
    tried: set[PeerId] = field(default_factory=set)
    located: bool = False
    listed: bool = False  # the master named holders when it was asked last
    num_late: int = 0  # how often they had not got it yet
    late_s: float = 0.0  # when that was so first
    num_expired: int = 0
    failure: TanghuluError | None = None
    result: Chunk | int | TanghuluError | None = None

    def come_again(self) -> None:
        """Those whom the master names had not got it; it is asked once more."""
        self.located = False
        self.num_late += 1
        self.tried.clear()


def too_small(want: Want, size_bytes: int) -> bool:
    """Whether the caller's buffer cannot take the value; that is then the result."""
    assert want.buffer is not None
    if size_bytes <= want.buffer.size_bytes:
        return False
    want.result = InvalidRequest(
        f"{want.key!r} has {size_bytes} bytes, the buffer to read into only {want.buffer.size_bytes}"
    )
    return True


def not_found(key: str) -> ChunkNotFound:
    """Nobody who lives has it."""
    return ChunkNotFound(f"no live node holds {key!r}")


def mismatch(key: str, node: PeerId, found: Found) -> ChecksumMismatch:
    """The bytes changed on the way, or at their holder."""
    return ChecksumMismatch(f"the {found.size_bytes} bytes of {key!r} that arrived from {node} are not what was put")
