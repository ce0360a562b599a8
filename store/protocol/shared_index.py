"""Shared index of a node's chunks for clients of its host: read from the node's shared memory without a call.

A read of one key through the node costs a process switch each way, many times the cost of copying 64 KiB. So the node
publishes the locations of its chunks, in an area that clients of its host map beside the chunks, and a reader checks
there first: the one-sided reads of Pilaf (Mitchell et al., USENIX ATC 2013) over mapped memory. The node alone can
write to that area (see ``transfer_engine.core.segment``), so nobody can make readers believe in a missing chunk.

Nothing is locked. A reader takes an entry, copies the bytes it names, compares their checksum with the entry's and then
checks that the entry is still there: the node removes an entry *before* it gives the range to another, so bytes under a
current entry are those of its chunk. A torn entry does not match its own check. Any irregularity counts as not found,
and the node is called as before. The index is a cache: an entry may be displaced by others of its bucket, and chunks
with a time to live or several checksums are not in it.

    header, 64 bytes:  magic u64 | time of the owner's last sign of life, CLOCK_MONOTONIC, f64
                       | newest term of a master that the owner has reported to u64, of the etcd u64 (``terms``) | zeros
    bucket, 256 bytes: four entries
    entry, 64 bytes:   xxh3_128 of the key 16 | version u64 | offset u64 | size u64 | xxh3_64 of the value u64
                       | xxh3_64 of the 48 bytes before u64 | zeros 8

Example: a node of 1 GiB has 65,536 entries in 16,384 buckets, 4 MiB. A key whose hash begins with 0x2a41 (little-endian
u64 modulo 16,384 = 0x2a41) is in bucket 0x2a41, bytes [64 + 0x2a41 * 256, + 256) of the index.

A killed node leaves its pages readable to processes that map them: readers trust an index only for ``MAX_SILENCE_S``
after the owner's last sign of life, far less than the master waits before it gives a node up.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import xxhash

from tanghulu.rpc.wire import U32, U64
from tanghulu.store.protocol.terms import Term

_xxh3_64: Callable[[bytes | memoryview], int] = xxhash.xxh3_64_intdigest
_xxh3_128: Callable[[bytes, int], bytes] = xxhash.xxh3_128_digest

MAGIC = 0x3158444E49475354
HEADER_BYTES = 64
ENTRY_BYTES = 64
ENTRIES_PER_BUCKET = 4
BUCKET_BYTES = ENTRY_BYTES * ENTRIES_PER_BUCKET
#: Bytes of chunks per entry: 0.4 % of the memory is used by the index.
BYTES_PER_ENTRY = 16 << 10
MIN_BUCKETS = 64
MAX_BUCKETS = 1 << 20
#: Longer than a node's step of the event loop ever takes, shorter than anybody needs to notice its death.
MAX_SILENCE_S = 0.25

_HEADER = struct.Struct("<Qd")
_BODY = struct.Struct("<16sQQQQ")  # the bytes covered by the entry's check
_ENTRY = struct.Struct("<16sQQQQQ8x")
_FIELDS = struct.Struct("<QQQQQ")
_WORD = struct.Struct("<Q")
_TIME = struct.Struct("<d")
_TIME_OFFSET = 8
_TERM = struct.Struct("<QQ")
_TERM_OFFSET = 16
_DIGEST_BYTES = 16
_NO_ENTRY = bytes(ENTRY_BYTES)


class IndexPlace(NamedTuple):
    """Position of the index in the node's published memory, and the seed of its hashes."""

    begin: U64
    num_buckets: U32
    seed: U64


class Entry(NamedTuple):
    """Location of a chunk. ``position`` and ``image`` are the entry's place and its bytes in the index."""

    version: int
    offset: int
    size_bytes: int
    checksum: int
    position: int
    image: bytes


def num_buckets_for(capacity_bytes: int) -> int:
    """Return the number of buckets for a node of ``capacity_bytes``; a power of two."""
    wanted = capacity_bytes // BYTES_PER_ENTRY // ENTRIES_PER_BUCKET
    return min(max(1 << max(wanted - 1, 0).bit_length(), MIN_BUCKETS), MAX_BUCKETS)


def index_bytes(num_buckets: int) -> int:
    """Return the bytes taken by an index."""
    return HEADER_BYTES + num_buckets * BUCKET_BYTES


class IndexWriter:
    """The owner's side. ``view`` is the index's memory, zeroed; ``seed`` keeps hashes unforeseeable."""

    def __init__(self, view: memoryview, seed: int, now_s: float) -> None:
        self._view = view
        self._seed = seed
        self._num_buckets = (len(view) - HEADER_BYTES) // BUCKET_BYTES
        _HEADER.pack_into(view, 0, MAGIC, now_s)

    def beat(self, now_s: float) -> None:
        """Record a sign of life."""
        _TIME.pack_into(self._view, _TIME_OFFSET, now_s)

    def publish_term(self, term: Term) -> None:
        """Publish the newest term known to the node; readers never see the number of one etcd as another's."""
        _TERM.pack_into(self._view, _TERM_OFFSET, 0, term.cluster)
        _TERM.pack_into(self._view, _TERM_OFFSET, *term)

    def publish(self, key: str, version: int, offset: int, size_bytes: int, checksum: int) -> None:
        """Let readers find the chunk from now on; an older entry of the bucket may be displaced."""
        digest = _xxh3_128(key.encode(), self._seed)
        body = _BODY.pack(digest, version, offset, size_bytes, checksum)
        start = self._bucket(digest)
        bucket = self._view[start : start + BUCKET_BYTES].tobytes()
        place = _find(bucket, digest)
        if place < 0:
            place = _find(bucket, _NO_ENTRY[:_DIGEST_BYTES])
        if place < 0:
            place = digest[-1] % ENTRIES_PER_BUCKET * ENTRY_BYTES
        place += start
        self._view[place : place + ENTRY_BYTES] = body + _WORD.pack(_xxh3_64(body)) + bytes(8)

    def withdraw(self, key: str) -> None:
        """Hide the chunk from readers; its range may be reused."""
        digest = _xxh3_128(key.encode(), self._seed)
        start = self._bucket(digest)
        place = _find(self._view[start : start + BUCKET_BYTES].tobytes(), digest)
        if place >= 0:
            self._view[start + place : start + place + ENTRY_BYTES] = _NO_ENTRY

    def close(self) -> None:
        """Make readers ignore the whole index."""
        self.beat(float("-inf"))

    def entries(self) -> dict[bytes, Entry]:
        """Return all entries by the hash of their key; for tests and ``check``."""
        found: dict[bytes, Entry] = {}
        words = np.frombuffer(self._view[HEADER_BYTES:], np.uint64).reshape(-1, ENTRY_BYTES // _WORD.size)
        for number in np.flatnonzero(words.any(axis=1)):
            position = HEADER_BYTES + int(number) * ENTRY_BYTES
            image = self._view[position : position + ENTRY_BYTES].tobytes()
            digest, version, offset, size, checksum, _ = _ENTRY.unpack(image)
            found[digest] = Entry(version, offset, size, checksum, position, image)
        return found

    def digest(self, key: str) -> bytes:
        """Return the index's hash of ``key``."""
        return _xxh3_128(key.encode(), self._seed)

    def _bucket(self, digest: bytes) -> int:
        number: int = _WORD.unpack_from(digest)[0]
        return HEADER_BYTES + number % self._num_buckets * BUCKET_BYTES

    def __repr__(self) -> str:
        return f"IndexWriter({self._num_buckets} buckets)"


class IndexReader:
    """A client's side; ``memory`` is the segment, ``published`` the node's published memory. Safe from any thread.

    ``key_scope`` is the prefix of all its keys there: a tenant's.
    """

    def __init__(self, memory: memoryview, published: memoryview, place: IndexPlace, key_scope: str = "") -> None:
        begin, num_buckets, seed = place
        assert begin + index_bytes(num_buckets) <= len(published), "the index lies inside what is published"
        self._memory, self._published = memory, published
        self._size_bytes = len(memory)
        self._begin = begin
        self._buckets = begin + HEADER_BYTES
        self._num_buckets = num_buckets
        self._seed = seed
        self._scope = key_scope.encode()

    @property
    def term(self) -> Term:
        """The term of the newest master that the owner has reported to."""
        return Term(*_TERM.unpack_from(self._published, self._begin + _TERM_OFFSET))

    def is_kept(self, now_s: float) -> bool:
        """Return whether the owner's last sign of life is recent; ``now_s`` is of CLOCK_MONOTONIC."""
        magic, beat_s = _HEADER.unpack_from(self._published, self._begin)
        return bool(magic == MAGIC and now_s - beat_s <= MAX_SILENCE_S)

    def find(self, key: str, now_s: float) -> Entry | None:
        """Return the node's entry for ``key``; None is inconclusive. ``now_s`` is of CLOCK_MONOTONIC."""
        published = self._published
        magic, beat_s = _HEADER.unpack_from(published, self._begin)
        if magic != MAGIC or now_s - beat_s > MAX_SILENCE_S:
            return None
        digest = _xxh3_128(self._scope + key.encode(), self._seed)
        start = self._buckets + _WORD.unpack_from(digest)[0] % self._num_buckets * BUCKET_BYTES
        bucket = published[start : start + BUCKET_BYTES].tobytes()
        place = _find(bucket, digest)
        if place < 0:
            return None
        version, offset, size, checksum, check = _FIELDS.unpack_from(bucket, place + _DIGEST_BYTES)
        if check != _xxh3_64(bucket[place : place + _BODY.size]) or offset + size > self._size_bytes:
            return None
        return Entry(version, offset, size, checksum, start + place, bucket[place : place + ENTRY_BYTES])

    def read(self, entry: Entry) -> bytes | None:
        """Return a copy of the chunk's bytes; None if they are gone or do not match."""
        offset = entry.offset
        value = self._memory[offset : offset + entry.size_bytes].tobytes()
        return value if self._holds(entry, value) else None

    def read_into(self, entry: Entry, target: memoryview) -> bool:
        """Copy the chunk's bytes; False if they are gone or do not match (``target`` is then undefined)."""
        offset = entry.offset
        target[:] = self._memory[offset : offset + entry.size_bytes]
        return self._holds(entry, target)

    def _holds(self, entry: Entry, value: bytes | memoryview) -> bool:
        position = entry.position
        stands = self._published[position : position + ENTRY_BYTES].tobytes() == entry.image
        return stands and _xxh3_64(value) == entry.checksum

    def __repr__(self) -> str:
        return f"IndexReader({self._num_buckets} buckets)"


def _find(bucket: bytes, digest: bytes) -> int:
    """Return the start in ``bucket`` of the entry of ``digest``; -1 if there is none."""
    place = bucket.find(digest)
    while place >= 0 and place % ENTRY_BYTES:
        place = bucket.find(digest, place + 1)
    return place
