"""The bytes of the tcp transport and of the shm door's hello: pure encoding and decoding.

A tcp connection carries, from the client, heads of HEAD_BYTES, a WRITE's followed by its payload; and from the server,
in the order of the heads, replies of REPLY_BYTES, each followed by a READ's payload or by a refusal's text.

    head   magic u32 | version u8 | op u8 | zero u16 | slice id u64 | session id u64 | lease id u64
           | generation u64 | offset u64 | length u64
    reply  magic u32 | version u8 | refused u8 | zero u16 | slice id u64 | num_bytes u64 (payload or refusal text)

HELLO opens every connection: ``offset`` is the connection's token (random, never 0), and a name that is not the
segment's (``lease_id`` carries its hash) is refused. FENCE names in ``offset`` the token of a connection that its
client has given up: the server cuts it, and refuses its hello if that comes later still, before it answers. A head that
is malformed closes the connection; one that is well-formed but not allowed is answered with a refusal.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import xxhash

from tanghulu.errors import TanghuluError, error_from_code

VERSION = 1
_HEAD_MAGIC = 0x7A6E6701
_REPLY_MAGIC = 0x7A6E6702
_DOOR_MAGIC = 0x7A6E6703
_HEAD = struct.Struct("<IBBHQQQQQQ")
_REPLY = struct.Struct("<IBBHQQ")
HEAD_BYTES = _HEAD.size
REPLY_BYTES = _REPLY.size
#: A refusal's text is cut to this, and a longer one is a malformed reply.
MAX_TEXT_BYTES = 4096
#: The longest range that one head may name; slices are far shorter.
MAX_LENGTH_BYTES = 1 << 40
_SEPARATOR = "\0"


class MalformedMessage(Exception):
    """The peer does not speak this protocol; the connection that it came from cannot be used any more."""


class Op(IntEnum):
    """What a head asks for; READ and WRITE have Opcode's values."""

    READ = 1
    WRITE = 2
    HELLO = 3
    FENCE = 4


class Head(NamedTuple):
    """One request on a tcp connection."""

    op: Op
    slice_id: int
    session_id: int
    lease_id: int
    generation: int
    offset: int
    length: int

    def pack(self) -> bytes:
        """HEAD_BYTES on the wire."""
        return _HEAD.pack(
            _HEAD_MAGIC, VERSION, self.op, 0, self.slice_id, self.session_id, self.lease_id,
            self.generation, self.offset, self.length,
        )  # fmt: skip


def parse_head(data: memoryview | bytes | bytearray) -> Head:
    """Decode HEAD_BYTES; raises MalformedMessage."""
    magic, version, op, zero, *numbers = _HEAD.unpack_from(data)
    if magic != _HEAD_MAGIC or version != VERSION or zero or op not in Op._value2member_map_:
        raise MalformedMessage(f"head with magic {magic:#x}, version {version}, op {op}")
    head = Head(Op(op), *numbers)
    if head.op in (Op.READ, Op.WRITE) and not 0 < head.length <= MAX_LENGTH_BYTES:
        raise MalformedMessage(f"head names {head.length} bytes")
    return head


def name_hash(name: str) -> int:
    """64 bits of a segment's name, for a hello."""
    return xxhash.xxh3_64_intdigest(name.encode())


def pack_reply(slice_id: int, num_bytes: int) -> bytes:
    """A reply that grants: ``num_bytes`` of payload follow (0 for everything but READ)."""
    return _REPLY.pack(_REPLY_MAGIC, VERSION, 0, 0, slice_id, num_bytes)


def pack_refusal(slice_id: int, error: TanghuluError) -> bytes:
    """A reply that refuses, together with its text."""
    text = pack_error(error)
    return _REPLY.pack(_REPLY_MAGIC, VERSION, 1, 0, slice_id, len(text)) + text


def parse_reply(data: memoryview | bytes | bytearray) -> tuple[bool, int, int]:
    """(refused, slice id, bytes that follow) of REPLY_BYTES; raises MalformedMessage."""
    magic, version, refused, zero, slice_id, num_bytes = _REPLY.unpack_from(data)
    if magic != _REPLY_MAGIC or version != VERSION or zero or refused > 1:
        raise MalformedMessage(f"reply with magic {magic:#x}, version {version}, flag {refused}")
    if refused and num_bytes > MAX_TEXT_BYTES:
        raise MalformedMessage(f"refusal with {num_bytes} bytes of text")
    return bool(refused), slice_id, num_bytes


def pack_error(error: TanghuluError) -> bytes:
    """A typed error as text: its code, a NUL, its message."""
    return f"{error.code}{_SEPARATOR}{error.message}".encode()[:MAX_TEXT_BYTES]


def parse_error(text: bytes) -> TanghuluError:
    """The inverse of pack_error; codes of newer peers become TanghuluError."""
    code, _, message = text.decode(errors="replace").partition(_SEPARATOR)
    return error_from_code(code, message)


# --- the shm door: one hello, one answer that carries the descriptor, then silence until one side hangs up

_HELLO = struct.Struct("<IBBHQQ")
_ANSWER = struct.Struct("<IBBHQ")
DOOR_HELLO_BYTES = _HELLO.size
DOOR_ANSWER_BYTES = _ANSWER.size


@dataclass(frozen=True, slots=True)
class DoorHello:
    """What a client of the shm door asks for."""

    name: str
    generation: int
    session_id: int

    def pack(self) -> bytes:
        """DOOR_HELLO_BYTES and the name."""
        name = self.name.encode()
        return _HELLO.pack(_DOOR_MAGIC, VERSION, 0, len(name), self.generation, self.session_id) + name


def parse_door_hello(data: bytes) -> tuple[int, int, int]:
    """(length of the name that follows, generation, session id); raises MalformedMessage."""
    magic, version, zero, name_bytes, generation, session_id = _HELLO.unpack(data)
    if magic != _DOOR_MAGIC or version != VERSION or zero:
        raise MalformedMessage(f"shm hello with magic {magic:#x}, version {version}")
    return name_bytes, generation, session_id


def pack_door_answer(size_bytes: int, error: TanghuluError | None = None) -> bytes:
    """The answer: the segment's size (a descriptor travels beside it), or a refusal."""
    text = pack_error(error) if error is not None else b""
    return _ANSWER.pack(_DOOR_MAGIC, VERSION, 1 if text else 0, len(text), size_bytes) + text


def parse_door_answer(data: bytes) -> tuple[int, int]:
    """(bytes of refusal text that follow, size of the segment); raises MalformedMessage."""
    magic, version, refused, text_bytes, size_bytes = _ANSWER.unpack(data)
    if magic != _DOOR_MAGIC or version != VERSION or bool(refused) != bool(text_bytes) or text_bytes > MAX_TEXT_BYTES:
        raise MalformedMessage(f"shm answer with magic {magic:#x}, version {version}")
    return text_bytes, size_bytes
