"""Layout of chunks in the SSD tier's file: pure encoding, no I/O.

The file begins with HEADER_BYTES. Their first and their last unit of 4096 bytes contain the superblock, twice, so that
one bad sector does not cost everything behind it. Records follow, each at a multiple of the unit:

    head: magic 8 | head bytes u32 | key bytes u16 | pin u8 | replicas u8 | version u64 | value bytes u64 | place u64 |
          ends (Unix seconds, 0: never) f64 | left when written (s) f64 | sequence u64 | part bytes u64 | parts u32 |
          key | parts (u64 each, xxh3_64 of the value) | digest 16
    the value, directly behind the head; zeros up to the next unit

The digest is blake2b over the rest of the head, keyed with the file's random id: bytes of a value that look like a
head, by chance or by malice, are not one. ``place`` is the position at which the record was written, so a head that a
broken device returns from elsewhere is not one either. A record is dead once its first unit is zeros. Later writes have
a higher ``sequence``: if power was lost before a wipe was on the medium, there may be two records of one key, and the
one with the higher sequence is right.

Example: a value of 5000 bytes under a key of 44 has a head of 144 bytes, and takes two units, 8192 bytes.
"""

from __future__ import annotations

import hashlib
import struct

import msgspec

from tanghulu.store.protocol.checksums import MAX_PARTS, Checksums
from tanghulu.store.protocol.types import Pin
from tanghulu.types import MAX_KEY_BYTES, ChunkKey

UNIT = 4096
#: Bytes before the records; far enough for the two superblocks not to share a page of flash.
HEADER_BYTES = 16 * UNIT
SUPERBLOCK_PLACES = (0, HEADER_BYTES - UNIT)
#: Length of the id of a file, which is the key of its digests.
FILE_ID_BYTES = 16
#: Format of the layout; a file of another format is refused.
FORMAT = 2
_SUPER_MAGIC = b"THTIER"
_SUPER = struct.Struct("<6s2s16s")
_MAGIC = b"THCHUNK2"
_HEAD = struct.Struct("<8sIHBBQQQddQQI")
_DIGEST_BYTES = 16
MAX_HEAD_BYTES = _HEAD.size + MAX_KEY_BYTES + 8 * MAX_PARTS + _DIGEST_BYTES
_PINS = (Pin.NONE, Pin.SOFT, Pin.HARD)


class SsdRecord(msgspec.Struct, frozen=True, gc=False):
    """The head of a record. ``ends_unix_s`` None: the chunk has no end."""

    key: ChunkKey
    version: int
    size_bytes: int
    checksums: Checksums
    pin: Pin = Pin.NONE
    ends_unix_s: float | None = None
    left_s: float = 0.0
    replicas: int = 1
    sequence: int = 0

    @property
    def head_bytes(self) -> int:
        """Length of the head; the value begins behind it."""
        return _HEAD.size + len(self.key.encode()) + 8 * len(self.checksums.parts) + _DIGEST_BYTES

    @property
    def record_bytes(self) -> int:
        """Length of the record in the file, a multiple of the unit."""
        return -(-(self.head_bytes + self.size_bytes) // UNIT) * UNIT


def encode_superblock(file_id: bytes) -> bytes:
    """Return one unit of the header."""
    body = _SUPER.pack(_SUPER_MAGIC, b"%02d" % FORMAT, file_id)
    return (body + _digest(body, b"")).ljust(UNIT, b"\0")


def decode_superblock(data: bytes | memoryview) -> bytes | None:
    """Return the file's id; None if the unit is not a sound superblock of this format."""
    body = bytes(data[: _SUPER.size])
    if tier_format(data) != FORMAT or bytes(data[_SUPER.size : _SUPER.size + _DIGEST_BYTES]) != _digest(body, b""):
        return None
    return bytes(_SUPER.unpack(body)[2])


def tier_format(data: bytes | memoryview) -> int | None:
    """Return the format of a superblock, sound or not; None for foreign bytes, which are never overwritten."""
    magic, number, _ = _SUPER.unpack(bytes(data[: _SUPER.size]).ljust(_SUPER.size, b"\0"))
    return int(number) if magic == _SUPER_MAGIC and number.isdigit() else None


def encode_head(record: SsdRecord, place: int, file_id: bytes) -> bytes:
    """Return the head of ``record`` when written at ``place``."""
    key, parts = record.key.encode(), record.checksums.parts
    body = (
        _HEAD.pack(
            _MAGIC,
            record.head_bytes,
            len(key),
            _PINS.index(record.pin),
            min(record.replicas, 255),
            record.version,
            record.size_bytes,
            place,
            record.ends_unix_s or 0.0,
            record.left_s,
            record.sequence,
            record.checksums.part_bytes,
            len(parts),
        )
        + key
        + struct.pack(f"<{len(parts)}Q", *parts)
    )
    return body + _digest(body, file_id)


def has_magic(data: bytes | memoryview, position: int = 0) -> bool:
    """Return whether a head may begin at ``position``; cheap, for scans."""
    return bytes(data[position : position + len(_MAGIC)]) == _MAGIC


def decode_head(data: bytes | memoryview, place: int, file_id: bytes) -> SsdRecord | None:
    """Return the record whose head ``data`` begins with; None if there is none, or not of this file and place."""
    if len(data) < _HEAD.size or not has_magic(data):
        return None
    fields = _HEAD.unpack(data[: _HEAD.size])
    _, head_bytes, key_bytes, pin, copies, version, size_bytes, own_place, ends, left_s, *more = fields
    sequence, part_bytes, num_parts = more
    if head_bytes != _HEAD.size + key_bytes + 8 * num_parts + _DIGEST_BYTES or head_bytes > len(data):
        return None
    body = bytes(data[: head_bytes - _DIGEST_BYTES])
    if own_place != place or bytes(data[head_bytes - _DIGEST_BYTES : head_bytes]) != _digest(body, file_id):
        return None
    key = body[_HEAD.size : _HEAD.size + key_bytes].decode()
    parts = struct.unpack_from(f"<{num_parts}Q", body, _HEAD.size + key_bytes)
    checksums = Checksums(part_bytes, parts)
    return SsdRecord(ChunkKey(key), version, size_bytes, checksums, _PINS[pin], ends or None, left_s, copies, sequence)


def _digest(body: bytes, file_id: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES, key=file_id).digest()
