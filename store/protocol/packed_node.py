"""The packed messages between client and node; see ``packed`` for their layout."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tanghulu.errors import TanghuluError
from tanghulu.store.protocol.checksums import Checksums, validate
from tanghulu.store.protocol.packed import (
    U32,
    pack_error,
    pack_keys,
    pack_sized,
    pack_sums,
    refuses_nonsense,
    unpack_error,
    unpack_keys,
    unpack_sized,
    unpack_sums,
)
from tanghulu.store.protocol.types import NewChunk, Pin, validate_key

_PUT = struct.Struct("<IB3xI")
_ITEM = struct.Struct("<QQQIHHBB2x")
_RESERVATION = struct.Struct("<QQB")
_COMMIT = struct.Struct("<IB3xIIIQ")
_COMMIT_ITEM = struct.Struct("<QQH")
_GET = struct.Struct("<IBI")
_GET_ONE = struct.Struct("<IBII")
_GET_REPLY = struct.Struct("<II")
_FOUND = struct.Struct("<QQQQQHB")
_UNPIN = struct.Struct("<QI")

_COPIES, _FAILED, _EXISTED = 1, 2, 4
_PINS = (Pin.NONE, Pin.SOFT, Pin.HARD)
_PIN_NUMBERS = {pin: number for number, pin in enumerate(_PINS)}
_ONE_NEW = U32.pack(1) + b"\0"
_ONE_EXISTED = U32.pack(1) + b"\1"

# --- put and reserve


def pack_put(items: Iterable[NewChunk], visible: bool, deadline_ms: int) -> bytes:
    """PutRequest, and ReserveRequest with ``visible`` False."""
    packed: list[bytes] = [b""]
    for key, version, size, sums, pin, ttl_s, replicas in items:
        name = key.encode()
        ttl_ms = 0 if ttl_s is None else max(1, round(ttl_s * 1000))
        packed.append(
            _ITEM.pack(version, size, sums.part_bytes, ttl_ms, len(name), len(sums.parts), _PIN_NUMBERS[pin], replicas)
            + pack_sums(sums)
            + name
        )
    packed[0] = _PUT.pack(deadline_ms, visible, len(packed) - 1)
    return b"".join(packed)


class PutRequest(NamedTuple):
    """A PutRequest or a ReserveRequest."""

    items: list[NewChunk]
    visible: bool
    deadline_ms: int


@refuses_nonsense
def unpack_put(data: bytes) -> PutRequest:
    """See ``pack_put``; raises InvalidRequest for a bad key, pin or checksums too."""
    deadline_ms, visible, count = _PUT.unpack_from(data)
    position = _PUT.size
    items: list[NewChunk] = []
    for _ in range(count):
        version, size, part_bytes, ttl_ms, key_bytes, num_parts, pin, replicas = _ITEM.unpack_from(data, position)
        position += _ITEM.size
        sums = unpack_sums(data, position, part_bytes, num_parts)
        position += 8 * num_parts
        end = position + key_bytes
        key = validate_key(data[position:end].decode())
        position = end
        validate(sums, size)
        items.append(NewChunk(key, version, size, sums, _PINS[pin], ttl_ms / 1000 if ttl_ms else None, replicas or 1))
    if position != len(data):
        raise ValueError(f"{count} items end at {position} of {len(data)} bytes")
    return PutRequest(items, bool(visible), deadline_ms)


def pack_outcomes(outcomes: Sequence[bool | TanghuluError]) -> bytes:
    """PutReply or CommitReply: of each value whether it existed, or why it failed."""
    if len(outcomes) == 1:
        if outcomes[0] is False:
            return _ONE_NEW
        if outcomes[0] is True:
            return _ONE_EXISTED
    codes = bytes([2 if isinstance(each, TanghuluError) else each for each in outcomes])
    errors = [pack_error(each) for each in outcomes if isinstance(each, TanghuluError)]
    return b"".join((U32.pack(len(codes)), codes, *errors))


@refuses_nonsense
def unpack_outcomes(data: bytes) -> list[bool | TanghuluError]:
    """See ``pack_outcomes``."""
    if data == _ONE_NEW:
        return [False]
    (count,) = U32.unpack_from(data)
    position = U32.size + count
    outcomes: list[bool | TanghuluError] = []
    for code in data[U32.size : position]:
        if code == 2:
            error, position = unpack_error(data, position)
            outcomes.append(error)
        else:
            outcomes.append(code == 1)
    if len(outcomes) != count:
        raise ValueError(f"{len(outcomes)} outcomes, {count} were announced")
    return outcomes


class Reservation(NamedTuple):
    """A range to write."""

    lease_id: int
    offset: int
    copies_only: bool


def pack_reservations(outcomes: Sequence[Reservation | TanghuluError | None]) -> bytes:
    """ReserveReply; None: the key exists."""
    packed = [U32.pack(len(outcomes))]
    for each in outcomes:
        if each is None:
            packed.append(_RESERVATION.pack(0, 0, _EXISTED))
        elif isinstance(each, TanghuluError):
            packed += (_RESERVATION.pack(0, 0, _FAILED), pack_error(each))
        else:
            packed.append(_RESERVATION.pack(each.lease_id, each.offset, each.copies_only * _COPIES))
    return b"".join(packed)


@refuses_nonsense
def unpack_reservations(data: bytes) -> list[Reservation | TanghuluError | None]:
    """See ``pack_reservations``."""
    (count,) = U32.unpack_from(data)
    position = U32.size
    outcomes: list[Reservation | TanghuluError | None] = []
    for _ in range(count):
        lease_id, offset, flags = _RESERVATION.unpack_from(data, position)
        position += _RESERVATION.size
        if flags & _FAILED:
            error, position = unpack_error(data, position)
            outcomes.append(error)
        else:
            outcomes.append(None if flags & _EXISTED else Reservation(lease_id, offset, bool(flags & _COPIES)))
    return outcomes


# --- commit


class CommitRequest(NamedTuple):
    """``items``: (lease, checksums) that were written; ``aborted``: leases that were not.

    The first ``num_proclaimed`` items the master has accepted already, in the name of the node's ``generation``.
    """

    items: list[tuple[int, Checksums]]
    aborted: list[int]
    visible: bool
    deadline_ms: int
    num_proclaimed: int = 0
    generation: int = 0


def pack_commit(request: CommitRequest) -> bytes:
    """CommitRequest."""
    items, aborted, visible, deadline_ms, num_proclaimed, generation = request
    packed = [_COMMIT.pack(deadline_ms, visible, len(items), len(aborted), num_proclaimed, generation)]
    for lease_id, sums in items:
        packed += (_COMMIT_ITEM.pack(lease_id, sums.part_bytes, len(sums.parts)), pack_sums(sums))
    packed.append(struct.pack(f"<{len(aborted)}Q", *aborted))
    return b"".join(packed)


@refuses_nonsense
def unpack_commit(data: bytes) -> CommitRequest:
    """See ``pack_commit``."""
    deadline_ms, visible, count, num_aborted, num_proclaimed, generation = _COMMIT.unpack_from(data)
    position = _COMMIT.size
    items: list[tuple[int, Checksums]] = []
    for _ in range(count):
        lease_id, part_bytes, num_parts = _COMMIT_ITEM.unpack_from(data, position)
        position += _COMMIT_ITEM.size
        items.append((lease_id, unpack_sums(data, position, part_bytes, num_parts)))
        position += 8 * num_parts
    aborted = struct.unpack_from(f"<{num_aborted}Q", data, position)
    return CommitRequest(items, list(aborted), bool(visible), deadline_ms, num_proclaimed, generation)


# --- get and unpin


class GetRequest(NamedTuple):
    """``verify``: the node checks the bytes before it answers; ``deadline_ms`` is for chunks that come from an SSD."""

    keys: Sequence[str]
    max_inline_bytes: int
    verify: bool = False
    deadline_ms: int = 0


def pack_get(request: GetRequest) -> bytes:
    """GetRequest."""
    keys, max_inline_bytes, verify, deadline_ms = request
    if len(keys) == 1 and "\0" not in keys[0]:
        return _GET_ONE.pack(max_inline_bytes, verify, deadline_ms, 1) + keys[0].encode()
    return _GET.pack(max_inline_bytes, verify, deadline_ms) + pack_keys(keys)


@refuses_nonsense
def unpack_get(data: bytes) -> GetRequest:
    """See ``pack_get``."""
    max_inline_bytes, verify, deadline_ms = _GET.unpack_from(data)
    return GetRequest(unpack_keys(data, _GET.size, len(data)), max_inline_bytes, bool(verify), deadline_ms)


class Found(NamedTuple):
    """A chunk on a node: ``lease_id`` pins ``offset``; 0: the value came inline."""

    size_bytes: int
    version: int
    checksums: Checksums
    lease_id: int
    offset: int
    copies_only: bool


def pack_found(items: Sequence[Found | TanghuluError], lease_ms: int) -> bytes:
    """GetReply."""
    packed = [_GET_REPLY.pack(len(items), lease_ms)]
    for each in items:
        if isinstance(each, TanghuluError):
            packed += (_FOUND.pack(0, 0, 0, 0, 0, 0, _FAILED), pack_error(each))
            continue
        size, version, sums, lease_id, offset, copies_only = each
        packed.append(
            _FOUND.pack(size, version, lease_id, offset, sums.part_bytes, len(sums.parts), copies_only)
            + pack_sums(sums)
        )
    return b"".join(packed)


@refuses_nonsense
def unpack_found(data: bytes) -> list[Found | TanghuluError]:
    """See ``pack_found``."""
    (count, _lease_ms) = _GET_REPLY.unpack_from(data)
    position = _GET_REPLY.size
    found: list[Found | TanghuluError] = []
    for _ in range(count):
        size, version, lease_id, offset, part_bytes, num_parts, flags = _FOUND.unpack_from(data, position)
        position += _FOUND.size
        if flags & _FAILED:
            error, position = unpack_error(data, position)
            found.append(error)
            continue
        sums = unpack_sums(data, position, part_bytes, num_parts)
        position += 8 * num_parts
        found.append(Found(size, version, sums, lease_id, offset, bool(flags & _COPIES)))
    return found


class UnpinRequest(NamedTuple):
    """See ``messages.unpin``."""

    lease_ids: Sequence[int]
    bytes_read: int = 0
    corrupt: Sequence[str] = ()
    read: Sequence[str] = ()


def pack_unpin(request: UnpinRequest) -> bytes:
    """UnpinRequest."""
    leases, bytes_read, corrupt, read = request
    packed = _UNPIN.pack(bytes_read, len(leases)) + struct.pack(f"<{len(leases)}Q", *leases)
    return packed + pack_sized(corrupt) + pack_keys(read)


@refuses_nonsense
def unpack_unpin(data: bytes) -> UnpinRequest:
    """See ``pack_unpin``."""
    bytes_read, count = _UNPIN.unpack_from(data)
    leases = struct.unpack_from(f"<{count}Q", data, _UNPIN.size)
    corrupt, position = unpack_sized(data, _UNPIN.size + 8 * count)
    return UnpinRequest(leases, bytes_read, corrupt, unpack_keys(data, position, len(data)))
