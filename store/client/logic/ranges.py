"""Parts of values: what has to be read so that a range can be verified, and what of it the caller gets. Pure.

Checksums cover runs of ``part_bytes``. So a range is read with the parts around it, which are verified; a value with a
single checksum is read whole. Example: parts of 4 bytes, bytes [5, 7) are wanted: [4, 8) is read and compared with the
second checksum, and the caller gets the middle of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tanghulu.errors import InvalidRequest
from tanghulu.store.client.chunk import Chunk
from tanghulu.store.client.logic.wants import Range, Want, too_small
from tanghulu.store.protocol import checksums as sums
from tanghulu.store.protocol.checksums import Checksums
from tanghulu.transfer_engine.core.buffers import Buffer


def make_range(offset: int, length: int | None) -> Range | None:
    """The range, checked; None is the whole value. Raises InvalidRequest."""
    if offset < 0 or (length is not None and length < 1):
        raise InvalidRequest(f"offset={offset}, length={length} is no range of at least one byte")
    return None if offset == 0 and length is None else Range(offset, length)


def wanted_span(want: Want, size_bytes: int) -> tuple[int, int] | None:
    """(begin, end) of what the caller gets of a value of that size; None: nothing, the result says why."""
    if want.part is None:
        begin, end = 0, size_bytes
    else:
        begin = want.part.offset
        end = size_bytes if want.part.length is None else begin + want.part.length
    if not begin < end <= size_bytes:
        want.result = InvalidRequest(f"{want.key!r} has {size_bytes} bytes; [{begin}, {end}) is not within")
        return None
    if want.buffer is not None and too_small(want, end - begin):
        return None
    return begin, end


def covering_span(want: Want, size_bytes: int, checksums: Checksums) -> tuple[int, int] | None:
    """(begin, end) of what has to be read for it."""
    span = wanted_span(want, size_bytes)
    return None if span is None else sums.covering(checksums, size_bytes, *span)


def deliver(want: Want, version: int, size_bytes: int, begin: int, value: bytes | memoryview) -> None:
    """``value``, verified, is the part of the chunk that begins at ``begin``: give the caller what it wants of it."""
    span = wanted_span(want, size_bytes)
    if span is None:
        return
    memory = value[span[0] - begin : span[1] - begin]
    if want.buffer is None:
        want.result = Chunk(want.key, version, memory)
    else:
        want.buffer.view(0, len(memory))[:] = memory
        want.result = len(memory)


def scatter(chunk: Chunk, buffers: Sequence[Buffer]) -> int:
    """The chunk's bytes into ``buffers``, one filled behind the other; how many. Raises InvalidRequest."""
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
