"""Transfer requests, batches and results as callers see them. Rejects bad input.

Owns no progress; nothing here blocks or touches a socket.
"""

from __future__ import annotations

import itertools
import operator
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from tanghulu.errors import InvalidRequest, NodeUnavailable, TanghuluError, TransferFailed
from tanghulu.transfer_engine.client.batch_state import AdmittedRequest
from tanghulu.transfer_engine.core.buffers import Buffer
from tanghulu.transfer_engine.core.paths import Capability
from tanghulu.transfer_engine.core.segment import MAX_NAME_BYTES, SECRET_BYTES
from tanghulu.transfer_engine.core.slices import Notice, Opcode
from tanghulu.transfer_engine.core.wire import MAX_NOTICE_BYTES
from tanghulu.transfer_engine.transports.shm.long_copy import Digest

if TYPE_CHECKING:
    from tanghulu.transfer_engine.client.remote import RemoteSegment
    from tanghulu.transfer_engine.core.segment import SegmentDescriptor, SessionKey


#: Bounds of leases, sessions and generations, which travel as such.
_ID_BITS = 64


class TransferCancelled(TransferFailed):
    """The caller cancelled the batch before this request was complete."""


@dataclass(slots=True)
class TransferRequest:
    """Move ``length`` bytes between ``source`` and ``target``; not to be changed once submitted.

    ``source`` is the local side in both directions: a registered Buffer, or any C-contiguous buffer (numpy, bytes for
    WRITE, bytearray, memoryview). ``lease_id`` is the owner's reservation or pin (0 where the owner keeps no leases).

    ``verify``: both ends compute the xxh3_64 of each slice after it has landed. ``checksum``: the required xxh3_64 of
    all bytes of a READ, compared after the last has landed. In either case, mismatching bytes are moved once more, over
    other paths if any are left, and fail with ChecksumMismatch on a second mismatch. ``notify``: a message of 1 to
    4,096 bytes for the owner's program, delivered once, after all bytes have landed (and, for a READ, have arrived
    here); the request is complete when the owner has taken it. ``digest`` is shown all bytes, in order, if ``transfer``
    copies them through mapped memory, which leaves them in the cache; otherwise it is shown nothing, or ordered to
    forget them.
    """

    opcode: Opcode
    source: Any
    target: RemoteSegment
    target_offset: int
    length: int
    source_offset: int = 0
    lease_id: int = 0
    verify: bool = False
    checksum: int | None = None
    notify: bytes | None = None
    digest: Digest | None = None

    @property
    def plain(self) -> bool:
        """Whether it only moves bytes."""
        return not self.verify and self.checksum is None and self.notify is None


@dataclass(frozen=True, slots=True)
class TransferBatch:
    """Requests that move together, in any order: READs must not overlap locally, nor WRITEs remotely."""

    requests: Sequence[TransferRequest] = field(default_factory=list)


class TransferState(Enum):
    """State of one request of a batch."""

    OPEN = "open"
    COMPLETE = "complete"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class BatchResult:
    """Outcome of a batch: by request, None (all its bytes arrived) or the typed error.

    Where a request failed, the content of its READ's destination or WRITE's range is undefined. ``num_bytes`` counts
    the complete requests.
    """

    errors: tuple[TanghuluError | None, ...]
    num_bytes: int

    @property
    def ok(self) -> bool:
        """Whether every request is complete."""
        return not any(self.errors)

    def raise_first(self) -> None:
        """Raise the first request's error, if any."""
        for error in self.errors:
            if error is not None:
                raise error


def admit_buffer(request: TransferRequest) -> Buffer:
    """Return the request's local memory; raises InvalidRequest for a range out of bounds or a lost buffer."""
    if type(request.opcode) is not Opcode:
        raise InvalidRequest(f"opcode {request.opcode!r} is neither Opcode.READ nor Opcode.WRITE")
    source = request.source
    buffer = source if type(source) is Buffer else Buffer(source)
    if not buffer.registered:
        raise InvalidRequest(f"{buffer!r} is not registered any more")
    length, start, at, lease_id = request.length, request.source_offset, request.target_offset, request.lease_id
    if not (type(length) is type(start) is type(at) is type(lease_id) is int):
        length, start, at, lease_id = _take_numbers(request)
    if lease_id >> _ID_BITS:
        raise InvalidRequest(f"lease_id is {lease_id}; a lease is a number of {_ID_BITS} bits")
    if length <= 0:
        raise InvalidRequest(f"length is {length}; a transfer has at least one byte")
    if start < 0 or start + length > buffer.size_bytes:
        raise InvalidRequest(f"[{start}, +{length}) is outside the local buffer of {buffer.size_bytes} bytes")
    if at < 0 or at + length > request.target.size_bytes:
        raise InvalidRequest(f"[{at}, +{length}) is outside {request.target!r} of {request.target.size_bytes} bytes")
    if buffer.read_only and request.opcode is Opcode.READ:
        raise InvalidRequest("a READ needs a writable local buffer; this one is read-only")
    if not request.plain:
        _refuse_extras(request)
    return buffer


def _take_numbers(request: TransferRequest) -> tuple[int, int, int, int]:
    """Turn numbers of numpy and others into Python's own; raises InvalidRequest for non-integers."""
    for name in ("length", "source_offset", "target_offset", "lease_id"):
        given = getattr(request, name)
        try:
            setattr(request, name, operator.index(given))
        except TypeError:
            raise InvalidRequest(f"{name} is {given!r}; it must be an integer") from None
    return request.length, request.source_offset, request.target_offset, request.lease_id


def admit_deadline(deadline_s: float) -> None:
    """Raise InvalidRequest if it is not a number; a deadline already past is answered by DeadlineExceeded later."""
    if deadline_s != deadline_s:
        raise InvalidRequest(f"deadline_s is {deadline_s}; it must be a number")


def admit_descriptor(descriptor: SegmentDescriptor, session: SessionKey) -> None:
    """Raise InvalidRequest for a name or numbers that no segment has."""
    if not 0 < len(descriptor.name.encode()) <= MAX_NAME_BYTES:
        raise InvalidRequest(f"segment name {descriptor.name[:32]!r}... must have 1 to {MAX_NAME_BYTES} bytes")
    session_id, secret = session
    if len(secret) != SECRET_BYTES:
        raise InvalidRequest(f"session {session_id} has a secret of {len(secret)} bytes; it must have {SECRET_BYTES}")
    if session_id >> _ID_BITS or descriptor.generation >> _ID_BITS:
        raise InvalidRequest(
            f"session {session_id}, generation {descriptor.generation}: both are numbers of at most {_ID_BITS} bits"
        )


def _refuse_extras(request: TransferRequest) -> None:
    if request.notify is not None and not isinstance(request.notify, bytes | bytearray):
        raise InvalidRequest(f"a notice is bytes, not {type(request.notify).__name__}")
    if request.notify is not None and not 0 < len(request.notify) <= MAX_NOTICE_BYTES:
        raise InvalidRequest(f"a notice of {len(request.notify)} bytes; it must have 1 to {MAX_NOTICE_BYTES}")
    if request.checksum is None:
        return
    if request.opcode is not Opcode.READ:
        raise InvalidRequest("checksum is for a READ; set verify for a WRITE")
    if not 0 <= request.checksum < 1 << 64:
        raise InvalidRequest(f"checksum is {request.checksum}; it must be an unsigned 64-bit integer")


def admit(request: TransferRequest, buffer: Buffer) -> AdmittedRequest | TanghuluError:
    """Return the request as BatchState takes it, or why it already fails: target closed, or no path capable of it."""
    target = request.target
    if target.closed:
        return NodeUnavailable(f"{target!r} was closed in this process; open it again")
    if request.notify is not None and not target.paths.carries(Capability.NOTICE):
        return InvalidRequest(f"{target!r} has no tcp endpoint, so its owner cannot be notified")
    return AdmittedRequest(
        request.opcode,
        buffer,
        request.source_offset,
        request.target_offset,
        request.length,
        request.lease_id,
        target.paths,
        request.verify,
        request.checksum,
        None if request.notify is None else Notice(secrets.randbits(63) | 1, bytes(request.notify)),
    )


def refuse_overlaps(requests: Sequence[TransferRequest], buffers: Sequence[Buffer]) -> None:
    """Raise InvalidRequest if two READs of a batch would land in the same local bytes, or two WRITEs in the same remote
    ones.
    """
    if len(requests) < 2:
        return
    targets: list[tuple[int, int]] = []
    writes: dict[RemoteSegment, list[tuple[int, int]]] = {}
    for request, buffer in zip(requests, buffers, strict=True):
        if request.opcode is Opcode.READ:
            targets.append((buffer.address + request.source_offset, request.length))
        else:
            writes.setdefault(request.target, []).append((request.target_offset, request.length))
    _refuse_overlap(targets, "READs of the batch overlap locally")
    by_owner: dict[SegmentDescriptor, list[tuple[int, int]]] = {}
    for target, ranges in writes.items():
        by_owner.setdefault(target.descriptor, []).extend(ranges)
    for ranges in by_owner.values():
        _refuse_overlap(ranges, "WRITEs of the batch overlap")


def _refuse_overlap(ranges: list[tuple[int, int]], what: str) -> None:
    ranges.sort()
    for (start, length), (following, _) in itertools.pairwise(ranges):
        if start + length > following:
            raise InvalidRequest(f"two {what} at {following:#x}; give each its own bytes")
