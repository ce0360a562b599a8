"""The store's hot messages as the fast lane carries them: packed fields instead of protobuf.

A call of one key runs on cold caches: each process sleeps between two calls, and what it costs is the code and data it
touches, not the bytes it moves. So PUT, STREAM, SETTLE, GET, RESERVE, COMMIT, UNPIN and LOCATE travel as below, which
touches less than protobuf's messages do; gRPC carries the same messages as protobuf, and so does every other method of
the fast lane. protos/*.proto stays the schema: a test compares the fields by name.

All numbers are little-endian. ``n`` counts what follows; checksums are written in the form of ``sums``.

    keys       n u32 | the keys as UTF-8 with a zero byte between them (n's highest bit is 0)
               n u32 | n lengths u32 | the keys as UTF-8 behind each other (highest bit 1: some key has a zero byte)
    sized keys bytes u32 | keys
    sums       num_parts u64 each
    error      bytes of code u16 | bytes of message u16 | code | message
    outcomes   n u32 | n times u8: 0 new, 1 existed, 2 error | the errors in order

    PutRequest      deadline_ms u32 | visible u8, 3 zeros | n u32 | n items; the values are the attachment
    ReserveRequest  the same with visible 0
     item           version u64 | size u64 | part_bytes u64 | ttl_ms u32 | key bytes u16 | num_parts u16 | pin u8 |
                    replicas u8, 2 zeros | sums | key
    PutReply, CommitReply   outcomes
    ReserveReply    n u32 | n times: lease_id u64 | offset u64 | flags u8 (1 copies only, 2 error, 4 existed) | error
    CommitRequest   deadline_ms u32 | visible u8, 3 zeros | n u32 | aborted u32
                    | n times: lease_id u64 | part_bytes u64 | num_parts u16 | sums  | aborted lease ids u64
    StreamRequest   stream_id u64 | a PutRequest of one item; the value is the attachment
    SettleRequest   stream_id u64 | generation u64 | part_bytes u64 | num_parts u16 | word u8 | sums
    GetRequest      max_inline_bytes u32 | verify u8 | deadline_ms u32 | keys
    GetReply        n u32 | lease_ms u32 | n times: size u64 | version u64 | lease_id u64 | offset u64 | part_bytes u64
                    | num_parts u16 | flags u8 (1 copies only, 2 error) | sums or error; inline values: the attachment
    UnpinRequest    bytes_read u64 | n u32 | n lease ids u64 | sized corrupt keys | keys read
    LocateRequest   count_only u8 | keys
    LocateReply     incomplete u8 | count_only: n times u8
                    incomplete u8 | n u32 | n numbers of holders u16 | n numbers of warm ones u16 | n versions u64
                    | n sizes u64 | holders u16 | node ids as keys

Example: PUT of "ab" = b"xyz" at version 7 with checksum 9, deadline 1000 ms: e8030000 01000000 01000000, then
0700000000000000 0300000000000000 0000000000000000 00000000 0200 0100 00010000 0900000000000000 6162; attachment "xyz".
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import wraps
from typing import ParamSpec, TypeVar

from tanghulu.errors import InvalidRequest, TanghuluError, error_from_code
from tanghulu.store.protocol.checksums import MAX_PARTS, NO_CHECKSUMS, Checksums

P = ParamSpec("P")
R = TypeVar("R")

U32 = struct.Struct("<I")
U64 = struct.Struct("<Q")
_ERROR = struct.Struct("<HH")
_ZEROS_INSIDE = 1 << 31
_MAX_TEXT = (1 << 16) - 1


def refuses_nonsense(unpack: Callable[P, R]) -> Callable[P, R]:
    """Whatever is wrong with bytes from a peer is InvalidRequest."""

    @wraps(unpack)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return unpack(*args, **kwargs)
        except (struct.error, UnicodeDecodeError, IndexError, ValueError) as error:
            raise InvalidRequest(f"bytes are not a message ({unpack.__name__}): {error}") from None

    return checked


def pack_keys(keys: Sequence[str]) -> bytes:
    """Many keys, or none."""
    text = "\0".join(keys)
    if text.count("\0") < len(keys):
        return U32.pack(len(keys)) + text.encode()
    encoded = [key.encode() for key in keys]
    lengths = struct.pack(f"<{len(keys)}I", *map(len, encoded))
    return b"".join((U32.pack(len(keys) | _ZEROS_INSIDE * bool(keys)), lengths, *encoded))


def unpack_keys(data: bytes, begin: int, end: int) -> list[str]:
    """The keys in ``data[begin:end]``."""
    (count,) = U32.unpack_from(data, begin)
    begin += U32.size
    if not count:
        return []
    if not count & _ZEROS_INSIDE:
        keys = data[begin:end].decode().split("\0")
        if len(keys) != count:
            raise ValueError(f"{len(keys)} keys, {count} were announced")
        return keys
    count ^= _ZEROS_INSIDE
    lengths = struct.unpack_from(f"<{count}I", data, begin)
    begin += 4 * count
    keys = []
    for length in lengths:
        keys.append(data[begin : begin + length].decode())
        begin += length
    if begin != end:
        raise ValueError(f"keys of {begin} bytes in {end}")
    return keys


def pack_sized(keys: Sequence[str]) -> bytes:
    """Keys that something follows."""
    packed = pack_keys(keys)
    return U32.pack(len(packed)) + packed


def unpack_sized(data: bytes, begin: int) -> tuple[list[str], int]:
    """(keys that begin at ``begin``, where what follows begins)."""
    end = begin + U32.size + U32.unpack_from(data, begin)[0]
    if end > len(data):
        raise ValueError("keys end behind the message")
    return unpack_keys(data, begin + U32.size, end), end


def pack_sums(sums: Checksums) -> bytes:
    """The parts of ``sums``."""
    parts = sums.parts
    return U64.pack(parts[0]) if len(parts) == 1 else struct.pack(f"<{len(parts)}Q", *parts)


def unpack_sums(data: bytes, position: int, part_bytes: int, count: int) -> Checksums:
    """Checksums of ``count`` parts that begin at ``position``."""
    if count == 1:
        return Checksums(part_bytes, U64.unpack_from(data, position))
    if not count:
        return NO_CHECKSUMS
    if count > MAX_PARTS:
        raise InvalidRequest(f"{count} checksums of one value are more than {MAX_PARTS}")
    return Checksums(part_bytes, struct.unpack_from(f"<{count}Q", data, position))


def pack_error(error: TanghuluError) -> bytes:
    """A typed error."""
    code, message = error.code.encode(), error.message.encode()[:_MAX_TEXT]
    return _ERROR.pack(len(code), len(message)) + code + message


def unpack_error(data: bytes, position: int) -> tuple[TanghuluError, int]:
    """(the error at ``position``, where what follows begins)."""
    code_bytes, message_bytes = _ERROR.unpack_from(data, position)
    begin = position + _ERROR.size
    middle, end = begin + code_bytes, begin + code_bytes + message_bytes
    if end > len(data):
        raise ValueError("an error's text ends behind the message")
    return error_from_code(data[begin:middle].decode(), data[middle:end].decode(errors="replace")), end
