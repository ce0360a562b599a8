"""The request of one get: a key, a part of its value, and a destination; and the span to read for it. Pure.

Checksums cover runs of ``part_bytes``. So a range is read with the parts around it, which are verified; a value with a
single checksum is read whole. Example: parts of 4 bytes, requested bytes [5, 7): [4, 8) is read and compared with the
second checksum, and the caller gets the middle of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from tanghulu.arguments import whole
from tanghulu.errors import InvalidRequest, TanghuluError
from tanghulu.store.client.chunk import Chunk
from tanghulu.store.client.logic.effects import PeerId
from tanghulu.store.protocol import checksums as sums
from tanghulu.store.protocol.checksums import Checksums
from tanghulu.transfer_engine.core.buffers import Buffer
from tanghulu.types import MAX_VALUE_BYTES


class Range(NamedTuple):
    """A part of a value; ``length`` None: up to its end."""

    offset: int
    length: int | None


class ValueCheck(Protocol):
    """Verification of a whole value by itself, at the price of one pass over its bytes as they arrive."""

    def begin(self) -> None:
        """Start over: the value arrives now, perhaps not for the first time."""

    def add(self, piece: memoryview) -> None:
        """See ``Digest`` of the transfer engine."""

    def void(self) -> None:
        """See ``Digest``."""

    def holds(self) -> bool:
        """Return whether the received bytes are right. If not, the checksums decide whether they match the put."""


@dataclass(slots=True)
class GetOp:
    """One key to read, into ``buffer``, or into a Chunk if that is None. Done when ``result`` is set.

    ``part`` None: all of the value. ``pieces`` are several destination buffers; a moved value goes there at once, and
    an inline one is a Chunk first, for ``scatter_result``.
    """

    key: str
    buffer: Buffer | None = None
    part: Range | None = None
    pieces: Sequence[Buffer] = ()
    value_check: ValueCheck | None = None
    from_ssd: bool = False  # the node had to read the value from its SSD
    holders: list[PeerId] = field(default_factory=list)
    tried: set[PeerId] = field(default_factory=set)
    located: bool = False
    listed: bool = False  # the master named holders in its last answer
    num_late: int = 0  # number of times that they lacked it
    late_s: float = 0.0  # time of the first one
    num_expired: int = 0
    failure: TanghuluError | None = None
    result: Chunk | int | TanghuluError | None = None

    def come_again(self) -> None:
        """Ask the master once more, as the holders it named lacked the key."""
        self.located = False
        self.num_late += 1
        self.tried.clear()


def too_small(op: GetOp, size_bytes: int) -> bool:
    """Return whether the caller's buffer is too small for the value; that is then the result."""
    assert op.buffer is not None
    if size_bytes <= op.buffer.size_bytes:
        return False
    op.result = InvalidRequest(
        f"{op.key!r} has {size_bytes} bytes, the buffer to read into only {op.buffer.size_bytes}"
    )
    return True


def make_range(offset: int, length: int | None) -> Range | None:
    """Return the checked range; None is the whole value. Raises InvalidRequest."""
    offset = whole("offset", offset, 0, MAX_VALUE_BYTES)
    if length is not None:
        length = whole("length", length, 1, MAX_VALUE_BYTES)
    return None if offset == 0 and length is None else Range(offset, length)


def wanted_span(op: GetOp, size_bytes: int) -> tuple[int, int] | None:
    """Return (begin, end) of the caller's part of a value of that size; None: nothing, the result has the reason."""
    if op.part is None:
        begin, end = 0, size_bytes
    else:
        begin = op.part.offset
        end = size_bytes if op.part.length is None else begin + op.part.length
    if not begin < end <= size_bytes:
        op.result = InvalidRequest(f"{op.key!r} has {size_bytes} bytes; [{begin}, {end}) is not within")
        return None
    if op.buffer is not None and too_small(op, end - begin):
        return None
    if op.pieces:
        room = sum(buffer.size_bytes for buffer in op.pieces)
        if size_bytes > room:
            op.result = InvalidRequest(f"{op.key!r} has {size_bytes} bytes, the buffers to read into only {room}")
            return None
    return begin, end


def covering_span(op: GetOp, size_bytes: int, checksums: Checksums) -> tuple[int, int] | None:
    """Return (begin, end) of the bytes to read for it."""
    span = wanted_span(op, size_bytes)
    return None if span is None else sums.covering(checksums, size_bytes, *span)


def deliver(op: GetOp, version: int, size_bytes: int, begin: int, value: bytes | memoryview) -> None:
    """Deliver the caller's part of ``value``, the verified part of the chunk that begins at ``begin``."""
    span = wanted_span(op, size_bytes)
    if span is None:
        return
    memory = value[span[0] - begin : span[1] - begin]
    if op.buffer is None:
        op.result = Chunk(op.key, version, memory)
    else:
        op.buffer.view(0, len(memory))[:] = memory
        op.result = len(memory)


def scatter(chunk: Chunk, buffers: Sequence[Buffer]) -> int:
    """Copy the chunk's bytes into ``buffers``, filled in order; return their number. Raises InvalidRequest."""
    room = sum(buffer.size_bytes for buffer in buffers)
    if chunk.size_bytes > room:
        raise InvalidRequest(f"{chunk.key!r} has {chunk.size_bytes} bytes, the buffers to read into only {room}")
    source, position = chunk.view, 0
    for buffer in buffers:
        length = min(buffer.size_bytes, chunk.size_bytes - position)
        if length:
            np.copyto(buffer.array[:length], np.frombuffer(source[position : position + length], np.uint8))
        position += length
    return chunk.size_bytes


def scatter_result(op: GetOp) -> None:
    """Copy the chunk of ``op`` into its pieces, and close it; the result becomes its size or an error."""
    if isinstance(op.result, Chunk):
        with op.result as chunk:
            try:
                op.result = scatter(chunk, op.pieces)
            except InvalidRequest as error:
                op.result = error
