"""What callers say and hear: transfer requests, batches, results. Also the door where bad input is turned away.

Owns no progress; nothing here blocks or touches a socket.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from tanghulu.errors import InvalidRequest, NodeUnavailable, TanghuluError, TransferFailed
from tanghulu.transfer_engine.buffers import Buffer
from tanghulu.transfer_engine.opcode import Opcode
from tanghulu.transfer_engine.transfer_run import RunRequest

if TYPE_CHECKING:
    from tanghulu.transfer_engine.remote import RemoteSegment


class TransferCancelled(TransferFailed):
    """The caller cancelled the batch before this request was complete."""


@dataclass(slots=True)
class TransferRequest:
    """Move ``length`` bytes between ``source`` and ``target``; not to be changed once it is submitted.

    ``source`` is the local side in both directions: a registered Buffer, or any C-contiguous buffer (numpy, bytes for
    WRITE, bytearray, memoryview). ``lease_id`` is the owner's reservation or pin (0 where the owner keeps no leases).
    """

    opcode: Opcode
    source: Any
    target: RemoteSegment
    target_offset: int
    length: int
    source_offset: int = 0
    lease_id: int = 0


@dataclass(frozen=True, slots=True)
class TransferBatch:
    """Requests that move together. READs must not overlap locally; WRITEs that overlap remotely end in any order."""

    requests: Sequence[TransferRequest] = field(default_factory=list)


class RequestState(Enum):
    """Where one request of a batch stands."""

    OPEN = "open"
    COMPLETE = "complete"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class BatchResult:
    """How a batch ended: by request, None (all its bytes arrived) or the typed error.

    Where a request failed, what its READ's destination or WRITE's range holds is undefined.
    ``num_bytes`` counts the complete requests.
    """

    errors: tuple[TanghuluError | None, ...]
    num_bytes: int

    @property
    def ok(self) -> bool:
        """Whether every request is complete."""
        return not any(self.errors)

    def raise_first(self) -> None:
        """Raise the first request's error, if there is one."""
        for error in self.errors:
            if error is not None:
                raise error


def admit_buffer(request: TransferRequest) -> Buffer:
    """The request's local memory; raises InvalidRequest for ranges outside of either side, or a buffer that is gone."""
    if type(request.opcode) is not Opcode:
        raise InvalidRequest(f"opcode {request.opcode!r} is neither Opcode.READ nor Opcode.WRITE")
    source = request.source
    buffer = source if type(source) is Buffer else Buffer(source)
    if not buffer.registered:
        raise InvalidRequest(f"{buffer!r} is not registered any more")
    length, start, at = request.length, request.source_offset, request.target_offset
    if length <= 0:
        raise InvalidRequest(f"a transfer of {length} bytes; it must have at least one")
    if start < 0 or start + length > buffer.size_bytes:
        raise InvalidRequest(f"[{start}, +{length}) is outside the local buffer of {buffer.size_bytes} bytes")
    if at < 0 or at + length > request.target.size_bytes:
        raise InvalidRequest(f"[{at}, +{length}) is outside {request.target!r} of {request.target.size_bytes} bytes")
    if buffer.read_only and request.opcode is Opcode.READ:
        raise InvalidRequest("a READ needs a writable local buffer; this one is read-only")
    return buffer


def admit(request: TransferRequest, buffer: Buffer) -> RunRequest | TanghuluError:
    """The request as the run wants it, or why it fails already: its target is closed."""
    target = request.target
    if target.closed:
        return NodeUnavailable(f"{target!r} was closed in this process; open it again")
    return RunRequest(
        request.opcode,
        buffer,
        request.source_offset,
        request.target_offset,
        request.length,
        request.lease_id,
        target.paths,
    )


def refuse_overlaps(requests: Sequence[TransferRequest], buffers: Sequence[Buffer]) -> None:
    """Raise InvalidRequest if two READs of a batch would land in the same local bytes."""
    if len(requests) < 2:
        return
    landings = sorted(
        (buffer.address + request.source_offset, request.length)
        for request, buffer in zip(requests, buffers, strict=True)
        if request.opcode is Opcode.READ
    )
    for (start, length), (following, _) in itertools.pairwise(landings):
        if start + length > following:
            raise InvalidRequest(f"two READs of the batch overlap locally at {following:#x}; give each its own bytes")
