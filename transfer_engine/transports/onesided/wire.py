"""Bytes by which a client and the owner of a segment set up one-sided transfers: pure encoding and decoding.

rdma and ucx move bytes past the owner's process; the messages between the two processes go over a tcp *control
connection* to the owner. It belongs to one *end* (a queue pair, an agent) on each side. The client sends CONNECT once
and receives all it needs to reach the owner's end, made for it alone; then it may send the others; each is answered, in
order. When the connection ends, for any reason, the owner closes its end.

    request  magic u32 | version u8 | op u8 | payload's length u16 | number u64 | session id u64 | generation u64
             | hash of the segment's name u64 | offset u64 | length u64 | payload: CONNECT's, the transport's own
    answer   magic u32 | version u8 | op u8 | refused u8 | leased u8 (whether ADMIT is required) | payload's length u32
             | digest u64 | payload: CONNECT's, the transport's own, or the text of a refusal

``number`` is a connection's token (random, never 0) for CONNECT, FENCE and CLOSE, and a lease for the others.
``offset`` and ``length`` of CONNECT are the session's secret, without which it is refused. ADMIT requests a lease under
which the client will use the end: at least once per lease and connection, also for a slice retried over another, so
that no slice begins under a lease that has ended. FENCE names a connection, of any transport but shm, that its client
has given up: the owner cuts it, or refuses it if it arrives later, before it answers. CLOSE has the owner close this
connection's end before it answers: from then on nothing sent through it can land. READ and WRITTEN request the xxh3_64
of a range of the segment, under a lease to read or to write it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from tanghulu.errors import TanghuluError
from tanghulu.transfer_engine.core.wire import (
    MAX_TEXT_BYTES,
    MalformedMessage,
    check_version,
    pack_error,
    parse_error,
)

_REQUEST = struct.Struct("<IBBHQQQQQQ")
_ANSWER = struct.Struct("<IBBBBIQ")
REQUEST_BYTES = _REQUEST.size
ANSWER_BYTES = _ANSWER.size
#: A CONNECT carries at most a device's name and address.
MAX_CONNECT_BYTES = 1024
#: An agent's metadata has about 500 bytes for each network device.
MAX_GRANTED_BYTES = 1 << 20


class ControlOp(IntEnum):
    """Operation requested by the client."""

    CONNECT = 1
    FENCE = 2
    CLOSE = 3
    ADMIT = 4
    READ = 5
    WRITTEN = 6


class ControlRequest(NamedTuple):
    """One message of the client; the module docstring lists the fields of each."""

    op: ControlOp
    number: int
    session_id: int = 0
    generation: int = 0
    name_hash: int = 0
    offset: int = 0
    length: int = 0
    payload: bytes = b""


class ControlAnswer(NamedTuple):
    """The owner's answer."""

    op: ControlOp
    refusal: TanghuluError | None = None
    payload: bytes = b""
    digest: int = 0
    leased: bool = False


@dataclass(frozen=True, slots=True)
class Dialect:
    """One transport's messages: its name, its version, and their leading magic numbers."""

    protocol: str
    version: int
    request_magic: int
    answer_magic: int

    def pack_request(self, request: ControlRequest) -> bytes:
        """Return a request for the wire."""
        op, *numbers, payload = request
        return _REQUEST.pack(self.request_magic, self.version, op, len(payload), *numbers) + payload

    def pack_answer(self, answer: ControlAnswer) -> bytes:
        """Return an answer for the wire."""
        refused = answer.refusal is not None
        payload = answer.payload if answer.refusal is None else pack_error(answer.refusal)
        head = _ANSWER.pack(
            self.answer_magic, self.version, answer.op, refused, answer.leased, len(payload), answer.digest
        )
        return head + payload

    def take_request(self, data: bytearray) -> ControlRequest | None:
        """Take one whole request off the front of ``data``; None if it is incomplete. Raises MalformedMessage."""
        check_version(data, self.request_magic, self.version, self.protocol, from_client=True)
        if len(data) < REQUEST_BYTES:
            return None
        magic, _, op, num_bytes, number, session_id, generation, name, offset, length = _REQUEST.unpack_from(data)
        if magic != self.request_magic or op not in ControlOp._value2member_map_ or num_bytes > MAX_CONNECT_BYTES:
            raise MalformedMessage(f"{self.protocol} request with magic {magic:#x}, op {op}, {num_bytes} bytes")
        payload = _take_payload(data, REQUEST_BYTES, num_bytes)
        if payload is None:
            return None
        return ControlRequest(ControlOp(op), number, session_id, generation, name, offset, length, payload)

    def take_answer(self, data: bytearray) -> ControlAnswer | None:
        """Take one whole answer off the front of ``data``; None if it is incomplete. Raises MalformedMessage."""
        check_version(data, self.answer_magic, self.version, self.protocol, from_client=False)
        if len(data) < ANSWER_BYTES:
            return None
        magic, _, op, refused, leased, num_bytes, digest = _ANSWER.unpack_from(data)
        longest = MAX_TEXT_BYTES if refused else MAX_GRANTED_BYTES
        if magic != self.answer_magic or op not in ControlOp._value2member_map_ or num_bytes > longest:
            raise MalformedMessage(f"{self.protocol} answer with magic {magic:#x}, op {op}, {num_bytes} bytes")
        payload = _take_payload(data, ANSWER_BYTES, num_bytes)
        if payload is None:
            return None
        if refused:
            return ControlAnswer(ControlOp(op), parse_error(payload))
        return ControlAnswer(ControlOp(op), None, payload, digest, bool(leased))


def _take_payload(data: bytearray, head_bytes: int, num_bytes: int) -> bytes | None:
    """Take a message off ``data`` if it is whole; return the bytes behind its head."""
    end = head_bytes + num_bytes
    if len(data) < end:
        return None
    payload = bytes(data[head_bytes:end])
    del data[:end]
    return payload
