"""Bytes of the tcp transport and of the shm transport's hello: pure encoding and decoding.

A tcp connection carries, from the client, heads of HEAD_BYTES, a WRITE's followed by its payload; and from the server,
in the order of the heads, replies of REPLY_BYTES, each followed by a READ's payload or by a refusal's text.

    head   magic u32 | version u8 | op u8 | flags u16 (1 verified) | slice id u64 | session id u64
           | lease id u64 | generation u64 | offset u64 | length u64 | digest u64
    reply  magic u32 | version u8 | refused u8 | zero u16 | slice id u64 | num_bytes u64 (payload or refusal text)
           | digest u64

HELLO opens every connection: ``offset`` is the connection's token (random, never 0), ``length`` and ``digest`` are the
secret of the session, to which the connection belongs from then on; a name other than the segment's (``lease_id``
carries its hash) is refused. FENCE names in ``offset`` the token of a connection that its client has given up: the
server cuts it, or refuses its hello if that arrives later, before it answers. NOTICE is followed by ``length`` bytes
for the owner's program; ``offset`` is the notice's number (random, never 0), by which the owner recognises a
repetition. A *verified* WRITE's head carries the xxh3_64 of its payload, which the owner compares with the landed
bytes; a verified READ's reply carries that of the payload behind it. A malformed head closes the connection; a
well-formed one that is not allowed is answered with a refusal.

Every message of every version, here and on the control connections of rdma and ucx, begins with its magic and its
version, and a refusal's flag never moves. An owner greeted in another version answers with a refusal in its own, as
soon as it has these five bytes, and they also reveal to a client the version of an answer: so both can name both
versions, whatever else has changed.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

import xxhash

from tanghulu.errors import TanghuluError, TransferFailed, VersionMismatch, error_from_code
from tanghulu.transfer_engine.core.segment import SessionKey

VERSION = 3
_HEAD_MAGIC = 0x7A6E6701
_REPLY_MAGIC = 0x7A6E6702
_SHM_MAGIC = 0x7A6E6703
_VERIFIED = 1
_PREFIX = struct.Struct("<IB")
_HEAD = struct.Struct("<IBBHQQQQQQQ")
_REPLY = struct.Struct("<IBBHQQQ")
_SECRET = struct.Struct("<QQ")
PREFIX_BYTES = _PREFIX.size
HEAD_BYTES = _HEAD.size
REPLY_BYTES = _REPLY.size
#: Longest refusal text; the sender cuts it, and a longer one is a malformed reply.
MAX_TEXT_BYTES = 4096
#: Longest range that one head may name; slices are far shorter.
MAX_LENGTH_BYTES = 1 << 40
#: Longest range of which the owner computes a digest in one go (2 ms); longer verified heads are refused.
MAX_VERIFIED_BYTES = 64 << 20
#: Longest notice.
MAX_NOTICE_BYTES = 4096
_SEPARATOR = "\0"


class MalformedMessage(Exception):
    """The peer does not speak this protocol; the connection cannot be used any more."""


class OtherVersion(MalformedMessage):
    """The peer speaks another version of this protocol; ``error`` names both, for either end."""

    def __init__(self, protocol: str, client: int, owner: int) -> None:
        self.error = VersionMismatch(
            f"the client speaks version {client} of the {protocol} protocol, the segment's owner version {owner}; "
            f"run one release at both ends"
        )
        super().__init__(self.error.message)


def check_version(
    data: memoryview | bytes | bytearray, magic: int, ours: int, protocol: str, *, from_client: bool
) -> None:
    """Raise OtherVersion if the other side's message with this beginning has another version than this side's."""
    if len(data) >= _PREFIX.size:
        its_magic, theirs = _PREFIX.unpack_from(data)
        if its_magic == magic and theirs != ours:
            client, owner = (theirs, ours) if from_client else (ours, theirs)
            raise OtherVersion(protocol, client, owner)


def typed_error(error: MalformedMessage, where: str) -> TanghuluError:
    """Return the error for a caller whose peer sent something malformed at ``where``."""
    if isinstance(error, OtherVersion):
        return VersionMismatch(f"{where}: {error}")
    return TransferFailed(f"{where}: {error}")


class Op(IntEnum):
    """Operation requested by a head; READ and WRITE have Opcode's values."""

    READ = 1
    WRITE = 2
    HELLO = 3
    FENCE = 4
    NOTICE = 5


_OPS = {int(op): op for op in Op}
#: By number, because an IntEnum's hash is computed in Python.
_LONGEST = {int(Op.READ): MAX_LENGTH_BYTES, int(Op.WRITE): MAX_LENGTH_BYTES, int(Op.NOTICE): MAX_NOTICE_BYTES}


class Head(NamedTuple):
    """One request on a tcp connection."""

    op: Op
    slice_id: int
    session_id: int
    lease_id: int
    generation: int
    offset: int
    length: int
    verified: bool = False
    digest: int = 0

    def pack(self) -> bytes:
        """Return HEAD_BYTES for the wire."""
        return pack_head(*self[:7], verified=self.verified, digest=self.digest)


def pack_head(
    op: int,
    slice_id: int,
    session_id: int,
    lease_id: int,
    generation: int,
    offset: int,
    length: int,
    *,
    verified: bool = False,
    digest: int = 0,
) -> bytes:
    """Return HEAD_BYTES for the wire, without making a ``Head`` first."""
    flags = _VERIFIED if verified else 0
    return _HEAD.pack(
        _HEAD_MAGIC, VERSION, op, flags, slice_id, session_id, lease_id, generation, offset, length, digest
    )


def parse_head(data: memoryview | bytes | bytearray) -> Head:
    """Decode HEAD_BYTES; raises MalformedMessage."""
    magic, version, number, flags, slice_id, session_id, lease_id, generation, offset, length, digest = (
        _HEAD.unpack_from(data)
    )
    op = _OPS.get(number)
    if magic != _HEAD_MAGIC or version != VERSION or flags > _VERIFIED or op is None:
        check_head_version(data)
        raise MalformedMessage(f"head with magic {magic:#x}, version {version}, op {number}")
    longest = _LONGEST.get(number)
    if longest is not None and not 0 < length <= longest:
        raise MalformedMessage(f"head names {length} bytes")
    return Head(op, slice_id, session_id, lease_id, generation, offset, length, bool(flags), digest)


def check_head_version(data: memoryview | bytes | bytearray) -> None:
    """Raise OtherVersion if a head with this beginning has another version."""
    check_version(data, _HEAD_MAGIC, VERSION, "tcp transfer", from_client=True)


def check_reply_version(data: memoryview | bytes | bytearray) -> None:
    """Raise OtherVersion if a reply with this beginning has another version."""
    check_version(data, _REPLY_MAGIC, VERSION, "tcp transfer", from_client=False)


def digest_of(data: memoryview) -> int:
    """Return the checksum of a slice or request: xxh3_64."""
    return xxhash.xxh3_64_intdigest(data)


def secret_numbers(secret: bytes) -> tuple[int, int]:
    """Return a session's secret as the two numbers of a hello."""
    first, second = _SECRET.unpack(secret)
    return first, second


def session_key(hello: Head) -> SessionKey:
    """Return the session named by a hello, and the secret that it carries."""
    return SessionKey(hello.session_id, _SECRET.pack(hello.length, hello.digest))


def name_hash(name: str) -> int:
    """Return 64 bits of a segment's name, for a hello."""
    return xxhash.xxh3_64_intdigest(name.encode())


def pack_reply(slice_id: int, num_bytes: int, digest: int = 0) -> bytes:
    """Return a granting reply: ``num_bytes`` of payload follow (0 for everything but READ)."""
    return _REPLY.pack(_REPLY_MAGIC, VERSION, 0, 0, slice_id, num_bytes, digest)


def pack_refusal(slice_id: int, error: TanghuluError) -> bytes:
    """Return a refusing reply, together with its text."""
    text = pack_error(error)
    return _REPLY.pack(_REPLY_MAGIC, VERSION, 1, 0, slice_id, len(text), 0) + text


def parse_reply(data: memoryview | bytes | bytearray) -> tuple[bool, int, int, int]:
    """Return (refused, slice id, bytes that follow, their digest) of REPLY_BYTES; raises MalformedMessage."""
    magic, version, refused, zero, slice_id, num_bytes, digest = _REPLY.unpack_from(data)
    if magic != _REPLY_MAGIC or version != VERSION or zero or refused > 1:
        check_reply_version(data)
        raise MalformedMessage(f"reply with magic {magic:#x}, version {version}, flag {refused}")
    if refused and num_bytes > MAX_TEXT_BYTES:
        raise MalformedMessage(f"refusal with {num_bytes} bytes of text")
    return refused == 1, slice_id, num_bytes, digest


def pack_error(error: TanghuluError) -> bytes:
    """Return a typed error as text: its code, a NUL, its message."""
    return f"{error.code}{_SEPARATOR}{error.message}".encode()[:MAX_TEXT_BYTES]


def parse_error(text: bytes) -> TanghuluError:
    """Invert pack_error; codes of newer peers become TanghuluError."""
    code, _, message = text.decode(errors="replace").partition(_SEPARATOR)
    return error_from_code(code, message)


# --- shm: one hello, one answer that carries the descriptor, then silence until one side disconnects

_HELLO = struct.Struct("<IBBHQQ16s")
_ANSWER = struct.Struct("<IBBHQQ")
SHM_HELLO_BYTES = _HELLO.size
SHM_ANSWER_BYTES = _ANSWER.size


def pack_shm_hello(name: str, generation: int, session: SessionKey) -> bytes:
    """Return a client's request at the owner's Unix socket: SHM_HELLO_BYTES and the name."""
    encoded = name.encode()
    return _HELLO.pack(_SHM_MAGIC, VERSION, 0, len(encoded), generation, *session) + encoded


def parse_shm_hello(data: bytes) -> tuple[int, int, SessionKey]:
    """Return (length of the name that follows, generation, session); raises MalformedMessage."""
    check_shm_hello_version(data)
    magic, version, zero, name_bytes, generation, session_id, secret = _HELLO.unpack(data)
    if magic != _SHM_MAGIC or version != VERSION or zero:
        raise MalformedMessage(f"shm hello with magic {magic:#x}, version {version}")
    return name_bytes, generation, SessionKey(session_id, secret)


def check_shm_hello_version(data: bytes) -> None:
    """Raise OtherVersion if a hello with this beginning has another version."""
    check_version(data, _SHM_MAGIC, VERSION, "shm", from_client=True)


def check_shm_answer_version(data: bytes) -> None:
    """Raise OtherVersion if an answer with this beginning has another version."""
    check_version(data, _SHM_MAGIC, VERSION, "shm", from_client=False)


def pack_shm_answer(size_bytes: int, address: int = 0, error: TanghuluError | None = None) -> bytes:
    """Return the answer: the segment's size and its address at the owner (a descriptor goes along), or a refusal."""
    text = pack_error(error) if error is not None else b""
    return _ANSWER.pack(_SHM_MAGIC, VERSION, 1 if text else 0, len(text), size_bytes, address) + text


def parse_shm_answer(data: bytes) -> tuple[int, int, int]:
    """Return (bytes of refusal text that follow, size of the segment, its address); raises MalformedMessage."""
    magic, version, refused, text_bytes, size_bytes, address = _ANSWER.unpack(data)
    if magic != _SHM_MAGIC or version != VERSION or bool(refused) != bool(text_bytes) or text_bytes > MAX_TEXT_BYTES:
        raise MalformedMessage(f"shm answer with magic {magic:#x}, version {version}")
    return text_bytes, size_bytes, address
