"""Types shared by the node, the master and the client, parts of the fast lane's messages among them."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, TypeAlias

import msgspec

from tanghulu.errors import InvalidRequest
from tanghulu.rpc.wire import U64, FastMessage
from tanghulu.store.protocol import checksums as sums
from tanghulu.store.protocol.checksums import NO_CHECKSUMS, Checksums
from tanghulu.store.protocol.terms import NO_TERM, Term
from tanghulu.types import MAX_KEY_BYTES, ChunkKey

#: Values up to this size travel inside requests and answers: one round trip instead of three.
MAX_INLINE_BYTES = 64 << 10
#: The same for answers of a node whose memory is not mapped: one stream then delivers a value sooner than a pin, a
#: transfer and an unpin (measured at 1 MiB: 660 us instead of 1,030, a plain stream in the same run 500).
MAX_MESSAGE_BYTES = 1 << 20


#: The largest size that the directory can store.
_MAX_COMMIT_BYTES = (1 << 44) - 1


class Pin(Enum):
    """Protection of a chunk from eviction; the value is the public name."""

    NONE = "none"
    SOFT = "soft"  # evicted only when nothing unpinned is left
    HARD = "hard"  # never evicted; a node bounds their total size

    __hash__ = object.__hash__  # members are single objects; Enum's own hash is a Python call for every look-up

    @classmethod
    def parse(cls, text: str) -> Pin:
        """Return the pin called ``text``; raises InvalidRequest that lists the known ones."""
        try:
            return cls(text)
        except ValueError:
            raise InvalidRequest(f"pin {text!r} is unknown; known: none, soft, hard") from None


class Tier(Enum):
    """Location of a chunk within a node; the value is the public name."""

    MEMORY = "memory"
    SSD = "ssd"

    __hash__ = object.__hash__  # see Pin


#: A key in a message. Its length in bytes is for ``validate_key``: here it is counted in characters.
Key: TypeAlias = Annotated[ChunkKey, msgspec.Meta(min_length=1, max_length=MAX_KEY_BYTES)]
#: The limit of 32 bits of milliseconds.
_TtlSeconds: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=((1 << 32) - 1) / 1000)]


class NewChunk(FastMessage, frozen=True):
    """A chunk to put. ``ttl_s`` None: no end; equal versions are replicas of one put.

    ``replicas`` nodes should hold it; the called node holds one of them.
    """

    key: Key
    version: U64
    size_bytes: U64
    checksums: Checksums = NO_CHECKSUMS
    pin: Pin = Pin.NONE
    ttl_s: _TtlSeconds | None = None
    replicas: Annotated[int, msgspec.Meta(ge=1, le=255)] = 1

    def with_checksums(self, checksums: Checksums) -> NewChunk:
        """Return this chunk with other checksums."""
        return msgspec.structs.replace(self, checksums=checksums)

    def validate(self) -> None:
        """Refuse a key with too many bytes, and checksums that do not fit the value's size."""
        validate_key(self.key)
        sums.validate(self.checksums, self.size_bytes)


class ClientCommit(FastMessage, frozen=True):
    """A client's commit: a chunk that it has written into a write buffer of ``node_id``, in run ``generation``.

    ``term`` is the newest known to the client; a master of an older one accepts no commit.
    """

    node_id: str
    generation: U64
    key: Key
    version: U64
    size_bytes: Annotated[int, msgspec.Meta(ge=0, le=_MAX_COMMIT_BYTES)]
    term: Term = NO_TERM

    def validate(self) -> None:
        """Refuse a key with too many bytes."""
        validate_key(self.key)


class CommitResult(Enum):
    """The answer to a client's commit."""

    EXISTS = 0  # a live node holds another version of the key: this put is a hit
    ACCEPTED = 1
    ASK_NODE = 2  # put it to the node, which knows better

    __hash__ = object.__hash__  # see Pin


#: Most chunks added by one announcement of a node: a smaller one names everything that the node has to report.
MAX_ANNOUNCED = 4096

#: A client's commit counts as known to the master if its node has it within this time; the master undoes it
#: later (see ``store.master.directory.pending_commits``). After a longer time the node announces the chunk before
#: it is reported to anybody.
RELIED_S = 1.0


def validate_key(key: str) -> ChunkKey:
    """Return ``key`` as a ChunkKey; raises InvalidRequest if it is empty, too long or not encodable."""
    if not (isinstance(key, str) and key.isascii() and 0 < len(key) <= MAX_KEY_BYTES):
        _check_encoded(key)
    return ChunkKey(key)


def _check_encoded(key: object) -> None:
    if not isinstance(key, str):
        raise InvalidRequest(f"a key is a str; {key!r:.80} is of type {type(key).__name__}")
    try:
        size = len(key.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"key {key!r} is not UTF-8: {error}") from None
    if not 0 < size <= MAX_KEY_BYTES:
        raise InvalidRequest(f"a key has 1 to {MAX_KEY_BYTES} bytes; this one has {size}")
