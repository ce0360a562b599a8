"""The packed messages of desks and proclamations.

All numbers are little-endian.

    DeskRequest      value_bytes u64
    DeskReply        head u64 | records u64 | num_records u32 | offset u64 | length u64; all 0: none now
    ProclaimRequest  generation u64 | version u64 | size_bytes u64 | bytes of node_id u16 | node_id | key
    ProclaimReply    verdict u8
    ProclaimManyRequest  generation u64 | bytes of node_id u16 | n u32 | node_id | n versions u64 | n sizes u64 | keys
    ProclaimManyReply    n times verdict u8

Example: "k" of 5 bytes at version 7 for node "n" of generation 2: 0200000000000000 0700000000000000 0500000000000000
0100 6e 6b.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from tanghulu.errors import InvalidRequest
from tanghulu.store.protocol.packed import U64, pack_keys, refuses_nonsense, unpack_keys
from tanghulu.store.protocol.types import Proclamation, Verdict, validate_key
from tanghulu.store.protocol.write_buffer import NO_DESK, DeskPlace

_PLACE = struct.Struct("<QQIQQ")
_PROCLAIM = struct.Struct("<QQQH")
_PROCLAIM_MANY = struct.Struct("<QHI")
_ACCEPTED = bytes([Verdict.ACCEPTED.value])
#: What the directory can keep of a size.
_MAX_SIZE = (1 << 44) - 1


def pack_desk_request(value_bytes: int) -> bytes:
    """DeskRequest."""
    return U64.pack(value_bytes)


@refuses_nonsense
def unpack_desk_request(data: bytes) -> int:
    """See ``pack_desk_request``."""
    (value_bytes,) = U64.unpack(data)
    return int(value_bytes)


def pack_desk(place: DeskPlace | None) -> bytes:
    """DeskReply."""
    return _PLACE.pack(*(place or NO_DESK))


@refuses_nonsense
def unpack_desk(data: bytes) -> DeskPlace | None:
    """See ``pack_desk``."""
    place = DeskPlace(*_PLACE.unpack(data))
    return place if place.length else None


def pack_proclaim(said: Proclamation) -> bytes:
    """ProclaimRequest."""
    node_id, generation, key, version, size_bytes = said
    node = node_id.encode()
    return _PROCLAIM.pack(generation, version, size_bytes, len(node)) + node + key.encode()


@refuses_nonsense
def unpack_proclaim(data: bytes) -> Proclamation:
    """See ``pack_proclaim``; raises InvalidRequest for a bad key too."""
    generation, version, size_bytes, node_bytes = _PROCLAIM.unpack_from(data)
    end = _PROCLAIM.size + node_bytes
    if size_bytes > _MAX_SIZE:
        raise InvalidRequest(f"no chunk has {size_bytes} bytes")
    key = validate_key(data[end:].decode())
    return Proclamation(data[_PROCLAIM.size : end].decode(), generation, key, version, size_bytes)


def pack_proclaim_many(said: Sequence[Proclamation]) -> bytes:
    """ProclaimManyRequest; all are of one node, and there is one at least."""
    node, count = said[0].node_id.encode(), len(said)
    return b"".join(
        (
            _PROCLAIM_MANY.pack(said[0].generation, len(node), count),
            node,
            struct.pack(f"<{count}Q", *[each.version for each in said]),
            struct.pack(f"<{count}Q", *[each.size_bytes for each in said]),
            pack_keys([each.key for each in said]),
        )
    )


@refuses_nonsense
def unpack_proclaim_many(data: bytes) -> list[Proclamation]:
    """See ``pack_proclaim_many``; raises InvalidRequest for a bad key too."""
    generation, node_bytes, count = _PROCLAIM_MANY.unpack_from(data)
    begin = _PROCLAIM_MANY.size + node_bytes
    node = data[_PROCLAIM_MANY.size : begin].decode()
    numbers = struct.unpack_from(f"<{2 * count}Q", data, begin)
    keys = unpack_keys(data, begin + 16 * count, len(data))
    if len(keys) != count or not count:
        raise ValueError(f"{len(keys)} keys, {count} were announced")
    if max(numbers[count:]) > _MAX_SIZE:
        raise InvalidRequest(f"no chunk has {max(numbers[count:])} bytes")
    return [
        Proclamation(node, generation, validate_key(key), version, size)
        for key, version, size in zip(keys, numbers[:count], numbers[count:], strict=True)
    ]


def pack_verdicts(verdicts: Sequence[Verdict]) -> bytes:
    """ProclaimManyReply."""
    return bytes([verdict.value for verdict in verdicts])


@refuses_nonsense
def unpack_verdicts(data: bytes) -> list[Verdict]:
    """See ``pack_verdicts``."""
    return [Verdict(number) for number in data]


def pack_verdict(verdict: Verdict) -> bytes:
    """ProclaimReply."""
    return _ACCEPTED if verdict is Verdict.ACCEPTED else bytes([verdict.value])


@refuses_nonsense
def unpack_verdict(data: bytes) -> Verdict:
    """See ``pack_verdict``."""
    if data == _ACCEPTED:
        return Verdict.ACCEPTED
    (number,) = data
    return Verdict(number)
