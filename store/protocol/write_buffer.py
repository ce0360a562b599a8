"""A write buffer: a range of a node's memory that one client fills with values and records, and the node empties.

A put through the node costs a process switch each way. A client of the node's host that puts often gets a write buffer
instead: it copies values into it, and for each value accepted by the master it publishes a record: key, version, place,
checksum. The node reads the records at its convenience, and before it answers anything that depends on its chunks; each
value then becomes a chunk in place. No process is woken for it.

Nothing is locked between the two processes; every word has one writer. A record is completely written before the number
of written records moves (and carries a check over its bytes and its number, for processors that do not keep the order
of stores). A *use* is a client's begun and unfinished work: a value being written, or one whose record is still to
come.

    head, 128 bytes, for as long as the client may look at it:
        the client's words   begun u64 | ended u64 | written u64 | left u64 | zeros to 64
        the node's words     taken u64 | closed u64 | zeros to 64
    records: num_records times 256 bytes, outside of all ranges too, so that a full range is full of values
    record: check u64 | version u64 | place u64 | size u64 | xxh3_64 of the value u64 | ttl_ms u32 | pin u8, zero |
            bytes of the key u16 | key

Closing: the node sets ``closed`` and, ``GRACE_S`` later, checks whether begun == ended. A client increments ``begun``
first and then checks ``closed``; so the node has seen a client that has not seen the word in time. Even then such a
client touches the head, therefore heads are outside of all ranges, and one is reused only after its client has set
``left`` (it will not read again) or its process has ended.

On a processor that does not keep the order of stores the node may see ``ended`` before ``written``, and either before
the record. So it trusts an ``ended`` that it has seen for ``GRACE_S``; and ``left``, which waits for nothing, is one
more than the number of written records: the node acts on it at once when it has taken that number.

Example: a second value of 4,096 bytes, under "k": begun = 2; the value goes to place 4,096 of the range; the master
accepts; record 1 is written, then written = 2, ended = 2. The node finds written != taken, makes a chunk at the range's
offset + 4,096, and sets taken = 2.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import xxhash

from tanghulu.rpc.wire import U32, U64, FastMessage
from tanghulu.store.protocol.types import Pin

_xxh3_64: Callable[[bytes, int], int] = xxhash.xxh3_64_intdigest

HEAD_BYTES = 128
RECORD_BYTES = 256
#: Values begin at multiples of it, as required by the node's allocator.
ALIGNMENT = 64
#: Much longer than a store takes to become visible to another processor.
GRACE_S = 0.002

_BEGUN, _ENDED, _WRITTEN, _LEFT, _TAKEN, _CLOSED = 0, 1, 2, 3, 8, 9
_CHECK = struct.Struct("<Q")
_BODY = struct.Struct("<QQQQIBxH")
MAX_KEY_BYTES = RECORD_BYTES - _CHECK.size - _BODY.size
_PINS = (Pin.NONE, Pin.SOFT)


class BufferPlace(FastMessage, frozen=True):
    """Location of a write buffer in its segment: its head, its records, and the range for its values."""

    head: U64
    records: U64
    num_records: U32
    offset: U64
    length: U64

    @property
    def end(self) -> int:
        """End of the last of its parts."""
        records_end = self.records + self.num_records * RECORD_BYTES
        return max(self.head + HEAD_BYTES, records_end, self.offset + self.length)


class Record(NamedTuple):
    """One value in a write buffer; ``place`` is relative to the write buffer's range. ``ttl_ms`` 0: no end."""

    key: str
    version: int
    place: int
    size_bytes: int
    checksum: int
    pin: Pin = Pin.NONE
    ttl_ms: int = 0


def pack_record(record: Record, number: int) -> bytes:
    """Return ``record`` as the ``number``-th of its write buffer; its key has at most MAX_KEY_BYTES."""
    key, version, place, size_bytes, checksum, pin, ttl_ms = record
    name = key.encode()
    body = _BODY.pack(version, place, size_bytes, checksum, ttl_ms, pin is Pin.SOFT, len(name)) + name
    return _CHECK.pack(_xxh3_64(body, number)) + body


def unpack_record(data: bytes, number: int) -> Record | None:
    """See ``pack_record``; None for bytes that are not (or not yet) that record."""
    version, place, size_bytes, checksum, ttl_ms, pin, key_bytes = _BODY.unpack_from(data, _CHECK.size)
    end = _CHECK.size + _BODY.size + key_bytes
    if end > len(data) or pin >= len(_PINS) or _xxh3_64(data[_CHECK.size : end], number) != _CHECK.unpack_from(data)[0]:
        return None
    try:
        key = data[_CHECK.size + _BODY.size : end].decode()
    except UnicodeDecodeError:
        return None
    return Record(key, version, place, size_bytes, checksum, _PINS[pin], ttl_ms)


def _words(memory: memoryview, head: int) -> memoryview:
    """Return aligned words: each is read and written by one instruction."""
    return memory[head : head + HEAD_BYTES].cast("Q")


class BufferWriter:
    """The client's side. Safe from any thread: uses are independent of each other."""

    def __init__(self, memory: memoryview, place: BufferPlace) -> None:
        assert place.end <= len(memory), "the write buffer lies inside the segment"
        self.offset = place.offset
        self._words = _words(memory, place.head)
        self._range = memory[place.offset : place.offset + place.length]
        self._records = memory[place.records : place.records + place.num_records * RECORD_BYTES]
        self._length = place.length
        self._num_records = place.num_records
        self._next = 0
        self._begun = self._ended = self._written = 0
        self._open: set[int] = set()  # places of values being written
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._has_left = False
        self.left = False

    @property
    def closed(self) -> bool:
        """Whether new uses are refused."""
        return self.left or bool(self._words[_CLOSED])

    def fits(self, size_bytes: int) -> bool:
        """Return whether there is still room for a value of that size, regardless of its record."""
        return self._next + size_bytes <= self._length

    def begin(self, size_bytes: int) -> int | None:
        """Begin a use: return the place for a value. None: closed, no room, or the node lags with its records."""
        with self._lock:
            if self.left:
                return None
            words, place = self._words, self._next
            num_waiting = self._begun - self._ended + self._written - words[_TAKEN]
            if place + size_bytes > self._length or num_waiting >= self._num_records:
                return None
            self._begun += 1
            words[_BEGUN] = self._begun
            if words[_CLOSED]:
                self._end()
                return None
            self._next = place + -(-size_bytes // ALIGNMENT) * ALIGNMENT
            self._open.add(place)
            return place

    def fill(self, place: int, value: memoryview) -> None:
        """Copy the value to its place."""
        self._range[place : place + len(value)] = value

    def publish(self, record: Record) -> None:
        """End a use: the node will make a chunk of the value."""
        with self._lock:
            number = self._written
            data = pack_record(record, number)
            start = number % self._num_records * RECORD_BYTES
            self._records[start : start + len(data)] = data
            self._open.discard(record.place)  # before the node may see it: from now on nobody abandons it
            self._written = self._words[_WRITTEN] = number + 1
            self._end()

    def abandon(self, place: int, size_bytes: int) -> None:
        """End a use without a chunk, if it has not ended: an interrupted caller need not know its progress."""
        with self._lock:
            if place not in self._open:
                return
            self._open.remove(place)
            if self._next == place + -(-size_bytes // ALIGNMENT) * ALIGNMENT:
                self._next = place
            self._end()

    def leave(self) -> None:
        """Begin no more uses, and do not read the head after the current ones have ended."""
        with self._lock:
            if not self.left:
                self.left = True
                if self._begun == self._ended:
                    self._say_left()

    def __del__(self) -> None:
        """Leave with the last reference, as nobody reads the head again. A forked child does not have the memory."""
        if not self._has_left and os.getpid() == self._pid:
            self._say_left()

    def _end(self) -> None:
        self._ended += 1
        self._words[_ENDED] = self._ended
        if self.left and self._begun == self._ended:
            self._say_left()

    def _say_left(self) -> None:
        """Set ``left`` as the last access: from now on the head may be another write buffer's."""
        self._has_left = True
        self._words[_LEFT] = self._written + 1

    def __repr__(self) -> str:
        return f"BufferWriter({self._written} of {self._num_records} records, {self._next} of {self._length} B)"


class BufferReader:
    """The node's side; the head is zeroed first."""

    def __init__(self, memory: memoryview, place: BufferPlace) -> None:
        memory[place.head : place.head + HEAD_BYTES] = bytes(HEAD_BYTES)
        self._words = _words(memory, place.head)
        self._records = memory[place.records : place.records + place.num_records * RECORD_BYTES]
        self._num_records = place.num_records
        self.taken = 0

    @property
    def fresh(self) -> bool:
        """Whether there are records not yet taken."""
        return bool(self._words[_WRITTEN] != self.taken)

    @property
    def sound(self) -> bool:
        """Whether a client could have written these numbers."""
        return bool(0 <= self._words[_WRITTEN] - self.taken <= self._num_records)

    def take(self) -> Iterator[Record | None]:
        """Yield the new records, each counted as taken; None, and no more, for an incomplete one."""
        words = self._words
        written = words[_WRITTEN]
        while self.taken != written:
            start = self.taken % self._num_records * RECORD_BYTES
            record = unpack_record(self._records[start : start + RECORD_BYTES].tobytes(), self.taken)
            yield record
            if record is None:
                return
            self.taken += 1
            words[_TAKEN] = self.taken

    def close(self) -> None:
        """Refuse new uses from now on."""
        self._words[_CLOSED] = 1

    @property
    def quiet(self) -> bool:
        """Whether no use is open; final when the write buffer has been closed, and seen so, for ``GRACE_S``."""
        ended = self._words[_ENDED]
        return bool(ended == self._words[_BEGUN])

    @property
    def num_ended(self) -> int:
        """Uses that have ended."""
        return self._words[_ENDED]

    @property
    def complete(self) -> bool:
        """Whether the client has left, and all its records were taken."""
        left = self._words[_LEFT]
        return bool(left and self.taken >= left - 1)

    @property
    def left(self) -> bool:
        """Whether the client will not read the head again."""
        return bool(self._words[_LEFT])

    def __repr__(self) -> str:
        return f"BufferReader({self.taken} taken)"
