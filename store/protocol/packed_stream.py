"""The packed messages of values that are received where they will lie; see ``packed`` for their layout."""

from __future__ import annotations

import struct
from typing import NamedTuple

from tanghulu.store.protocol.checksums import NO_CHECKSUMS, Checksums
from tanghulu.store.protocol.packed import U64, pack_sums, refuses_nonsense, unpack_sums
from tanghulu.store.protocol.packed_node import pack_put, unpack_put
from tanghulu.store.protocol.types import LastWord, NewChunk

_SETTLE = struct.Struct("<QQQHB")
_WORDS = tuple(LastWord)
assert [word.value for word in _WORDS] == list(range(len(_WORDS)))


class StreamRequest(NamedTuple):
    """A value that follows; ``stream_id`` names it on its connection."""

    stream_id: int
    item: NewChunk
    visible: bool
    deadline_ms: int


def pack_stream(request: StreamRequest) -> bytes:
    """StreamRequest."""
    stream_id, item, visible, deadline_ms = request
    return U64.pack(stream_id) + pack_put([item], visible, deadline_ms)


@refuses_nonsense
def unpack_stream(data: bytes) -> StreamRequest:
    """See ``pack_stream``; raises InvalidRequest for a bad key or pin too."""
    (stream_id,) = U64.unpack_from(data)
    (item,), visible, deadline_ms = unpack_put(data[U64.size :])
    return StreamRequest(stream_id, item, visible, deadline_ms)


class SettleRequest(NamedTuple):
    """The last word on a value that came before it. ``generation``: of the node in whose name it was proclaimed."""

    stream_id: int
    word: LastWord
    generation: int = 0
    checksums: Checksums = NO_CHECKSUMS


def pack_settle(request: SettleRequest) -> bytes:
    """SettleRequest."""
    stream_id, word, generation, sums = request
    return _SETTLE.pack(stream_id, generation, sums.part_bytes, len(sums.parts), word.value) + pack_sums(sums)


@refuses_nonsense
def unpack_settle(data: bytes) -> SettleRequest:
    """See ``pack_settle``."""
    stream_id, generation, part_bytes, num_parts, word = _SETTLE.unpack_from(data)
    sums = unpack_sums(data, _SETTLE.size, part_bytes, num_parts)
    if len(data) != _SETTLE.size + 8 * num_parts:
        raise ValueError(f"{num_parts} checksums in {len(data)} bytes")
    return SettleRequest(stream_id, _WORDS[word], generation, sums)
