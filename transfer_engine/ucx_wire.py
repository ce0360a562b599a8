"""The bytes by which two processes set up a pair of UCX agents: pure encoding and decoding.

One tcp connection to the owner's ucx door belongs to one agent at each end. The client says CONNECT once, gets the
owner's agent (made for it alone) and the segment's address, and may then send ADMITs, FENCEs and one CLOSE; each is
answered, in order. When the connection ends for whatever reason the owner closes its agent.

    request  magic u32 | version u8 | op u8 | zero u16 | token u64 | session id u64 | generation u64
             | hash of the segment's name u64
    answer   magic u32 | version u8 | op u8 | refused u8 | leased u8 (whether ADMIT is asked for) | length u32
             | segment's address u64 | so many bytes: CONNECT's agent metadata, or the text of a refusal

The operations mean what they mean for rdma (see ``rdma_wire``): ADMIT's ``token`` is a lease, FENCE's a connection of
any transport that its client has given up, CLOSE has the owner close this connection's agent before it answers.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from tanghulu.errors import TanghuluError
from tanghulu.transfer_engine.wire import (
    MalformedMessage,
    check_answer_version,
    check_request_version,
    pack_error,
    parse_error,
)

VERSION = 1
_REQUEST_MAGIC = 0x7A6E6706
_ANSWER_MAGIC = 0x7A6E6707
_REQUEST = struct.Struct("<IBBHQQQQ")
_ANSWER = struct.Struct("<IBBBBIQ")
REQUEST_BYTES = _REQUEST.size
ANSWER_BYTES = _ANSWER.size
#: An agent's metadata has about 500 bytes for each network device.
MAX_PAYLOAD_BYTES = 1 << 20


class UcxOp(IntEnum):
    """What the client asks for."""

    CONNECT = 1
    FENCE = 2
    CLOSE = 3
    ADMIT = 4


class UcxRequest(NamedTuple):
    """One message of the client; all but CONNECT need the token only."""

    op: UcxOp
    token: int
    session_id: int = 0
    generation: int = 0
    name_hash: int = 0

    def pack(self) -> bytes:
        """REQUEST_BYTES on the wire."""
        return _REQUEST.pack(_REQUEST_MAGIC, VERSION, self.op, 0, *self[1:])


class UcxAnswer(NamedTuple):
    """The owner's answer, to a CONNECT with its agent's metadata and the segment's address."""

    op: UcxOp
    refusal: TanghuluError | None = None
    metadata: bytes = b""
    address: int = 0
    leased: bool = False

    def pack(self) -> bytes:
        """The answer on the wire."""
        payload = self.metadata if self.refusal is None else pack_error(self.refusal)
        refused = self.refusal is not None
        head = _ANSWER.pack(_ANSWER_MAGIC, VERSION, self.op, refused, self.leased, len(payload), self.address)
        return head + payload


def check_request(data: bytes | bytearray) -> None:
    """Raise OtherVersion if a request that begins so is of another."""
    check_request_version(data, _REQUEST_MAGIC, VERSION, "ucx")


def check_answer(data: bytes | bytearray) -> None:
    """Raise OtherVersion if an answer that begins so is of another."""
    check_answer_version(data, _ANSWER_MAGIC, VERSION, "ucx")


def parse_request(data: bytes) -> UcxRequest:
    """Decode REQUEST_BYTES; raises MalformedMessage."""
    check_request(data)
    magic, version, op, zero, *numbers = _REQUEST.unpack(data)
    if magic != _REQUEST_MAGIC or version != VERSION or zero or op not in UcxOp._value2member_map_:
        raise MalformedMessage(f"ucx request with magic {magic:#x}, version {version}, op {op}")
    return UcxRequest(UcxOp(op), *numbers)


def parse_answer(data: bytearray) -> UcxAnswer | None:
    """Take one whole answer off the front of ``data``; None if there is none yet. Raises MalformedMessage."""
    check_answer(data)
    if len(data) < ANSWER_BYTES:
        return None
    magic, version, op, refused, leased, length, address = _ANSWER.unpack_from(data)
    if magic != _ANSWER_MAGIC or version != VERSION or op not in UcxOp._value2member_map_ or length > MAX_PAYLOAD_BYTES:
        raise MalformedMessage(f"ucx answer with magic {magic:#x}, version {version}, op {op}, {length} bytes")
    end = ANSWER_BYTES + length
    if len(data) < end:
        return None
    payload = bytes(data[ANSWER_BYTES:end])
    del data[:end]
    if refused:
        return UcxAnswer(UcxOp(op), parse_error(payload))
    return UcxAnswer(UcxOp(op), None, payload, address, bool(leased))
