"""The bytes by which two processes set up queue pairs: pure encoding and decoding.

One tcp connection to the owner's rdma door belongs to one queue pair at each end. The client says CONNECT once, gets
the owner's queue pair and the segment's key, and may then send ADMITs, FENCEs and one CLOSE; each is answered, in
order. When the connection ends for whatever reason the owner destroys its queue pair.

    request  magic u32 | version u8 | op u8 | zero u16 | token u64 | session id u64 | generation u64 | hash of the
             segment's name u64 | device's name 64 bytes, padded by NUL | gid 16 bytes | lid u16 | queue pair's number
             u32 | first packet u32 | mtu u8
    answer   magic u32 | version u8 | op u8 | refused u8 | leased u8 (whether ADMIT is asked for) | text's length u16
             | gid, lid, number, first packet, mtu as above
             | segment's address u64 | key u32 | text of a refusal

ADMIT's ``token`` is the lease under which the client will use the queue pair: it is asked once a lease and connection,
also when a slice is tried again over another, so that no slice begins under a lease that has ended. FENCE's names a
connection, of this transport or of tcp, that its client has given up: the owner cuts it, and
refuses it if it comes later still, before it answers. CLOSE has the owner destroy this connection's queue pair before
it answers: from then on nothing that was sent through it can land.
"""

from __future__ import annotations

import ipaddress
import struct
from enum import IntEnum
from typing import NamedTuple

from tanghulu.errors import TanghuluError
from tanghulu.transfer_engine.wire import (
    MAX_TEXT_BYTES,
    MalformedMessage,
    check_answer_version,
    check_request_version,
    pack_error,
    parse_error,
)

VERSION = 1
MAX_DEVICE_BYTES = 64
_REQUEST_MAGIC = 0x7A6E6704
_ANSWER_MAGIC = 0x7A6E6705
_REQUEST = struct.Struct("<IBBHQQQQ64s16sHIIB")
_ANSWER = struct.Struct("<IBBBBH16sHIIBQI")
REQUEST_BYTES = _REQUEST.size
ANSWER_BYTES = _ANSWER.size


class QueuePairAddress(NamedTuple):
    """How the other end finds a queue pair; ``mtu`` is the verbs enumeration (5 = 4096 bytes)."""

    gid: str
    lid: int
    number: int
    first_packet: int
    mtu: int


NO_ADDRESS = QueuePairAddress("::", 0, 0, 0, 0)


class RdmaOp(IntEnum):
    """What the client asks for."""

    CONNECT = 1
    FENCE = 2
    CLOSE = 3
    ADMIT = 4


class RdmaRequest(NamedTuple):
    """One message of the client; all but CONNECT need the token only."""

    op: RdmaOp
    token: int
    session_id: int = 0
    generation: int = 0
    name_hash: int = 0
    device: str = ""
    address: QueuePairAddress = NO_ADDRESS

    def pack(self) -> bytes:
        """REQUEST_BYTES on the wire."""
        return _REQUEST.pack(
            _REQUEST_MAGIC, VERSION, self.op, 0, self.token, self.session_id, self.generation, self.name_hash,
            self.device.encode(), *_pack_address(self.address),
        )  # fmt: skip


class RdmaAnswer(NamedTuple):
    """The owner's answer; a refusal has ``text_bytes`` behind it (see ``parse_error``)."""

    op: RdmaOp
    text_bytes: int
    address: QueuePairAddress
    segment_address: int
    segment_key: int
    leased: bool


def check_request(data: bytes | bytearray) -> None:
    """Raise OtherVersion if a request that begins so is of another."""
    check_request_version(data, _REQUEST_MAGIC, VERSION, "rdma")


def check_answer(data: bytes | bytearray) -> None:
    """Raise OtherVersion if an answer that begins so is of another."""
    check_answer_version(data, _ANSWER_MAGIC, VERSION, "rdma")


def parse_request(data: bytes) -> RdmaRequest:
    """Decode REQUEST_BYTES; raises MalformedMessage."""
    check_request(data)
    magic, version, op, zero, token, session_id, generation, hashed, device, *address = _REQUEST.unpack(data)
    if magic != _REQUEST_MAGIC or version != VERSION or zero or op not in RdmaOp._value2member_map_:
        raise MalformedMessage(f"rdma request with magic {magic:#x}, version {version}, op {op}")
    name = device.rstrip(b"\0").decode(errors="replace")
    return RdmaRequest(RdmaOp(op), token, session_id, generation, hashed, name, _parse_address(address))


def pack_answer(
    op: RdmaOp,
    address: QueuePairAddress = NO_ADDRESS,
    segment_address: int = 0,
    segment_key: int = 0,
    leased: bool = False,
) -> bytes:
    """An answer that grants."""
    return _ANSWER.pack(_ANSWER_MAGIC, VERSION, op, 0, leased, 0, *_pack_address(address), segment_address, segment_key)


def pack_refusal(op: RdmaOp, error: TanghuluError) -> bytes:
    """An answer that refuses, with its text."""
    text = pack_error(error)
    return _ANSWER.pack(_ANSWER_MAGIC, VERSION, op, 1, 0, len(text), *_pack_address(NO_ADDRESS), 0, 0) + text


def parse_answer(data: bytes | bytearray) -> RdmaAnswer:
    """Decode ANSWER_BYTES; raises MalformedMessage."""
    check_answer(data)
    magic, version, op, refused, leased, text_bytes, *rest = _ANSWER.unpack(data)
    known = magic == _ANSWER_MAGIC and version == VERSION and op in RdmaOp._value2member_map_
    if not known or bool(refused) != bool(text_bytes) or text_bytes > MAX_TEXT_BYTES:
        raise MalformedMessage(f"rdma answer with magic {magic:#x}, version {version}, op {op}")
    return RdmaAnswer(RdmaOp(op), text_bytes, _parse_address(rest[:5]), rest[5], rest[6], bool(leased))


__all__ = [
    "ANSWER_BYTES",
    "NO_ADDRESS",
    "REQUEST_BYTES",
    "QueuePairAddress",
    "RdmaAnswer",
    "RdmaOp",
    "RdmaRequest",
    "pack_answer",
    "pack_refusal",
    "parse_answer",
    "parse_error",
    "parse_request",
]


def _pack_address(address: QueuePairAddress) -> tuple[bytes, int, int, int, int]:
    gid = ipaddress.IPv6Address(address.gid).packed
    return gid, address.lid, address.number, address.first_packet, address.mtu


def _parse_address(fields: list[int | bytes]) -> QueuePairAddress:
    gid, lid, number, first_packet, mtu = fields
    assert isinstance(gid, bytes), "the structure says so"
    return QueuePairAddress(str(ipaddress.IPv6Address(gid)), int(lid), int(number), int(first_packet), int(mtu))
