"""The packed messages between client and master; see ``packed`` for their layout."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from tanghulu.store.protocol.packed import pack_keys, refuses_nonsense, unpack_keys

_LOCATED = struct.Struct("<BI")


class LocateRequest(NamedTuple):
    """``count_only``: it only matters whether somebody holds the key."""

    keys: list[str]
    count_only: bool


def pack_locate(keys: Sequence[str], count_only: bool) -> bytes:
    """LocateRequest."""
    return (b"\1" if count_only else b"\0") + pack_keys(keys)


@refuses_nonsense
def unpack_locate(data: bytes) -> LocateRequest:
    """See ``pack_locate``."""
    return LocateRequest(unpack_keys(data, 1, len(data)), bool(data[0]))


class Location(NamedTuple):
    """Who holds a key, the first ``num_warm`` of them in memory; without nodes: nobody is known to."""

    node_ids: tuple[str, ...] = ()
    version: int = 0
    size_bytes: int = 0
    num_warm: int = 0


NOWHERE = Location()


class LocateReply(NamedTuple):
    """``incomplete``: the master is rebuilding, and nobody known does not mean nobody."""

    locations: list[Location]
    incomplete: bool


def pack_located(locations: Sequence[Location], incomplete: bool) -> bytes:
    """LocateReply to a question that was not ``count_only``."""
    numbers: dict[str, int] = {}
    holders = [numbers.setdefault(node, len(numbers)) for each in locations for node in each.node_ids]
    count = len(locations)
    return (
        _LOCATED.pack(incomplete, count)
        + struct.pack(f"<{count}H", *[len(each.node_ids) for each in locations])
        + struct.pack(f"<{count}H", *[each.num_warm for each in locations])
        + struct.pack(f"<{count}Q", *[each.version for each in locations])
        + struct.pack(f"<{count}Q", *[each.size_bytes for each in locations])
        + struct.pack(f"<{len(holders)}H", *holders)
        + pack_keys(list(numbers))
    )


@refuses_nonsense
def unpack_located(data: bytes) -> LocateReply:
    """See ``pack_located``."""
    incomplete, count = _LOCATED.unpack_from(data)
    position = _LOCATED.size
    lengths = struct.unpack_from(f"<{count}H", data, position)
    warm = struct.unpack_from(f"<{count}H", data, position + 2 * count)
    columns = struct.unpack_from(f"<{2 * count}Q", data, position + 4 * count)
    position += 20 * count
    numbers = struct.unpack_from(f"<{sum(lengths)}H", data, position)
    names = unpack_keys(data, position + 2 * len(numbers), len(data))
    locations: list[Location] = []
    begin = 0
    for length, num_warm, version, size in zip(lengths, warm, columns[:count], columns[count:], strict=True):
        nodes = tuple([names[number] for number in numbers[begin : begin + length]])
        locations.append(Location(nodes, version, size, num_warm))
        begin += length
    return LocateReply(locations, bool(incomplete))


def pack_existence(found: bytes, incomplete: bool) -> bytes:
    """LocateReply to a ``count_only`` question: one byte a key, 0 or 1."""
    return (b"\1" if incomplete else b"\0") + found


@refuses_nonsense
def unpack_existence(data: bytes) -> tuple[list[bool], bool]:
    """(for each key whether somebody holds it, ``incomplete``)."""
    count = len(data) - 1
    if data.count(1, 1) == count:
        return [True] * count, bool(data[0])
    return [byte == 1 for byte in data[1:]], bool(data[0])
