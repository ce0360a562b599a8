"""The messages carried only by the fast lane, each defined here and nowhere else.

A class is the type in signatures, the bytes on the wire and their documentation at once; ``FastMessage`` defines how it
may change. Values travel behind a message, in the frame's attachment, concatenated. Types and bounds are checked as a
message is decoded, and ``validate`` checks the rest; the number of keys in one call is checked by the services, whose
errors say what to do. The methods are in ``methods``, the directory's messages in ``directory_messages`` and
``announcements``.

Example: the put of "ab" = b"xyz" at version 7 with checksum 9, to be acknowledged when the master knows, within 1 s, is
``PutRequest([NewChunk("ab", 7, 3, Checksums(0, (9,)))], True, 1000)``, 24 bytes, with the attachment b"xyz":
94 91 97 a26162 07 03 92 00 91 09 a46e6f6e65 c0 01 c3 cd03e8 00.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import msgspec

from tanghulu.errors import InvalidRequest, TanghuluError
from tanghulu.rpc.wire import U32, U64, Failure, FastMessage
from tanghulu.store.protocol.checksums import Checksums
from tanghulu.store.protocol.key_slots import NUM_RANGES
from tanghulu.store.protocol.range_map import RangeMap
from tanghulu.store.protocol.shared_index import IndexPlace
from tanghulu.store.protocol.terms import NO_TERM, UNSIGNED, Renewals, Signature, Term
from tanghulu.store.protocol.types import ClientCommit, CommitResult, NewChunk, Pin, Tier
from tanghulu.store.protocol.write_buffer import BufferPlace
from tanghulu.transfer_engine.core.segment import SegmentHello, SegmentWelcome
from tanghulu.types import Address

# --- sessions: HELLO


class NodeHello(SegmentHello, frozen=True):
    """A client that lost its connections names the leases still in use; its others are released."""

    held_lease_ids: Sequence[U64] = ()


class Welcome(SegmentWelcome, frozen=True):
    """``index``: of the chunks in the segment, for clients that map it; ``key_scope`` is the prefix of their keys."""

    index: IndexPlace | None = None
    key_scope: str = ""


# --- puts in one message: PUT


class PutRequest(FastMessage, frozen=True):
    """Values sent with the request. ``visible``: acknowledge only when the master has them.

    ``deadline_ms`` bounds the wait for leases that block it, ``master_ms`` the wait for the master, which any other
    node would have to make as well; 0: the same as ``deadline_ms``, whose 0 is the node's default.
    """

    items: list[NewChunk]
    visible: bool
    deadline_ms: U32
    master_ms: U32 = 0

    def validate(self) -> None:
        """Refuse an invalid item."""
        for item in self.items:
            item.validate()


class PutReply(FastMessage, frozen=True):
    """For each value whether its key existed already, a hit that wrote nothing, or its error; of COMMIT too.

    ``term``, here and in GetReply: of the newest master that the node has reported to, see ``terms``.
    """

    outcomes: list[bool | Failure]
    term: Term = NO_TERM

    @classmethod
    def of(cls, outcomes: Sequence[bool | TanghuluError], term: Term = NO_TERM) -> PutReply:
        """Return the reply with these outcomes."""
        return cls([Failure.of(each) if isinstance(each, TanghuluError) else each for each in outcomes], term)

    @property
    def results(self) -> list[bool | TanghuluError]:
        """The outcomes with typed errors."""
        return [each.error if isinstance(each, Failure) else each for each in self.outcomes]


# --- puts in three steps: RESERVE, a WRITE of the transfer engine, COMMIT


class ReserveRequest(FastMessage, frozen=True):
    """Values that need ranges. ``deadline_ms`` bounds the wait for leases that block them.

    ``visible``: of a key that exists, the master knows when the reply is sent, as in PutRequest.
    """

    items: list[NewChunk]
    deadline_ms: U32
    visible: bool = True

    def validate(self) -> None:
        """Refuse an invalid item."""
        for item in self.items:
            item.validate()


class Reservation(FastMessage, frozen=True, tag=0):
    """A range to write. ``copies_only``: through the node and not through a mapping, whose leases are used up."""

    lease_id: U64
    offset: U64
    copies_only: bool


class ReserveReply(FastMessage, frozen=True):
    """The range reserved for each value; None: its key exists."""

    reservations: list[Reservation | Failure | None]


class CommitItem(FastMessage, frozen=True):
    """A written reservation, and the checksums of its bytes."""

    lease_id: U64
    checksums: Checksums


class CommitRequest(FastMessage, frozen=True):
    """``items`` were written, the reservations ``aborted`` were not; ``visible`` and ``deadline_ms`` as in PutRequest.

    The master has accepted the first ``num_committed`` items already, in the name of the node's ``generation``, and in
    its ``term``: invalid for a node that has reported to its successor.
    """

    items: list[CommitItem]
    aborted: list[U64]
    visible: bool
    deadline_ms: U32
    num_committed: U32 = 0
    generation: U64 = 0
    term: Term = NO_TERM


# --- puts into a range of the node's memory given to the client in advance: DESK


class OpenBufferRequest(FastMessage, frozen=True):
    """``value_bytes``: size of a usual value."""

    value_bytes: U64


class OpenBufferReply(FastMessage, frozen=True):
    """None: there is no range to spare now."""

    place: BufferPlace | None


# --- gets: pin, a READ of the transfer engine, unpin; small values come with the answer


class GetRequest(FastMessage, frozen=True):
    """Request values; those of up to ``max_inline_bytes`` come with the reply, without a pin.

    ``deadline_ms`` bounds the wait for promotions from an SSD, 0: the node's default.
    """

    keys: Sequence[str]
    max_inline_bytes: U32
    deadline_ms: U32 = 0


class Found(FastMessage, frozen=True, tag=0):
    """A chunk on a node: ``lease_id`` pins ``offset``; 0: the value is in the attachment. ``copies_only`` as above.

    ``from_ssd``: the node has read it from its SSD for this answer.
    """

    size_bytes: U64
    version: U64
    checksums: Checksums
    lease_id: U64
    offset: U64
    copies_only: bool
    from_ssd: bool = False


class GetReply(FastMessage, frozen=True):
    """One item a key, in order. Fewer, but one at least: the rest did not fit into the node's memory; ask again."""

    items: list[Found | Failure]
    lease_ms: U32
    term: Term = NO_TERM


class UnpinRequest(FastMessage, frozen=True):
    """Unneeded leases, and the number of bytes really read under them, for the node's metrics.

    Keys whose bytes were ``corrupt``: the node verifies and drops them. Keys ``read`` through the shared index, in
    order.
    """

    lease_ids: Sequence[U64]
    bytes_read: U64 = 0
    corrupt: Sequence[str] = ()
    read: Sequence[str] = ()


class Done(FastMessage, frozen=True):
    """The empty answer."""


# --- chunks of a node: EXISTS, REMOVE, CHUNK_STAT


class KeysRequest(FastMessage, frozen=True):
    """The keys of an EXISTS or a CHUNK_STAT."""

    keys: Sequence[str]


class RemoveRequest(FastMessage, frozen=True):
    """Remove chunks; ``deadline_ms`` bounds the wait for the master, 0: the node's default."""

    keys: Sequence[str]
    deadline_ms: U32 = 0


class KeysReply(FastMessage, frozen=True):
    """A byte a key, 0 or 1: whether the node holds it, or held it until this REMOVE."""

    found: bytes


class ChunkInfo(FastMessage, frozen=True):
    """The store's description of a chunk. ``nodes`` are the holders' ids; the rest is of the first that answered.

    ``ttl_s`` is its remaining lifetime, None without end. In a node's answer ``key`` and ``nodes`` are empty.
    """

    key: str
    size_bytes: U64
    version: U64
    nodes: tuple[str, ...]
    checksums: Checksums
    pin: Pin
    num_leases: U64
    age_s: float
    num_hits: U64
    tier: Tier = Tier.MEMORY
    replicas: U32 = 1
    ttl_s: float | None = None


class StatReply(FastMessage, frozen=True):
    """The chunk of each key, None if the node has none."""

    chunks: list[ChunkInfo | None]


# --- administration of a node: EVICTION, DRAIN, EVICT, VERIFY, TENANTS


class EvictionPolicy(FastMessage, frozen=True):
    """The policy to switch to, "" to keep it; in the answer the current one."""

    name: str


class DrainRequest(FastMessage, frozen=True):
    """Have the node refuse new chunks from now on, or accept them again."""

    draining: bool


class EvictRequest(FastMessage, frozen=True):
    """Evict ``keys``, unless being read or pinned hard, and then ``num_bytes`` by the policy."""

    keys: Sequence[str]
    num_bytes: U64


class Evicted(FastMessage, frozen=True):
    """Chunks and bytes evicted on request."""

    num_chunks: U64
    num_bytes: U64


class VerifyRequest(FastMessage, frozen=True):
    """Compare a page of chunks, those behind the key ``after``, with their checksums; corrupt ones may be dropped.

    ``report``: the node reports all its chunks to the master again.
    """

    after: str
    limit: U32 = 0
    drop_corrupt: bool = False
    report: bool = False


class Verified(FastMessage, frozen=True):
    """One chunk of a node; ``corrupt``: its bytes do not match its checksums."""

    key: str
    version: U64
    size_bytes: U64
    corrupt: bool = False


class VerifiedPage(FastMessage, frozen=True):
    """Some chunks of a node in order of their keys, and whether there are more behind the last."""

    chunks: Sequence[Verified]
    more: bool


class TenantsRequest(FastMessage, frozen=True):
    """Request a node's figures of its tenants; a tenant gets its own alone."""


class TenantFigures(msgspec.Struct, array_like=True, gc=False):
    """One tenant at one node; "" is for chunks without one. Fields behind ``num_chunks`` count since the start.

    ``quota_bytes`` here, ``cluster_quota_bytes`` on all nodes; 0: no bound.
    """

    tenant: str
    quota_bytes: U64 = 0
    cluster_quota_bytes: U64 = 0
    used_bytes: U64 = 0
    num_chunks: U64 = 0
    hits: U64 = 0
    misses: U64 = 0
    evictions: U64 = 0
    hit_bytes: U64 = 0
    evicted_bytes: U64 = 0

    @property
    def idle(self) -> bool:
        """Whether there is nothing to report about it."""
        return not (self.num_chunks or self.hits or self.misses or self.evictions)


class TenantsReply(FastMessage, frozen=True):
    """The figures of each tenant."""

    tenants: list[TenantFigures]


# --- between client and master: LOCATE, COMMIT_KEYS


class LocateRequest(FastMessage, frozen=True):
    """Request holders; ``count_only``: it only matters whether there are any.

    ``removing``: the caller removes the chunks found, so no node becomes a holder of these versions any more.
    """

    keys: Sequence[str]
    count_only: bool
    removing: bool = False


class Location(FastMessage, frozen=True):
    """The live holders of a key, the first ``num_warm`` of them in memory and the others on their SSD.

    Each group is in order of arrival.
    """

    version: U64
    size_bytes: U64
    node_ids: tuple[str, ...]
    num_warm: U32


class LocateReply(FastMessage, frozen=True):
    """A location per key, None without a known holder; or, with ``count_only``, a byte a key in ``found``.

    ``incomplete``: the master is rebuilding, and an unknown holder does not mean none. ``signature``, here and in the
    other replies of a master: see ``terms``.
    """

    incomplete: bool
    locations: Sequence[Location | None] = ()
    found: bytes = b""
    signature: Signature = UNSIGNED

    @property
    def existence(self) -> list[bool]:
        """``found`` as booleans."""
        found = self.found
        return [True] * len(found) if found.count(1) == len(found) else [byte == 1 for byte in found]


class CommitKeysRequest(FastMessage, frozen=True):
    """Clients' commits of one put."""

    commits: Annotated[list[ClientCommit], msgspec.Meta(min_length=1)]

    def validate(self) -> None:
        """Refuse an invalid commit."""
        for each in self.commits:
            each.validate()


class CommitKeysReply(FastMessage, frozen=True):
    """A result for each of the commits."""

    results: list[CommitResult]
    signature: Signature = UNSIGNED


class ProveRequest(FastMessage, frozen=True):
    """Request an elected master's proof that it still leads, for callers without one, at first or after a silence."""


class ProveReply(FastMessage, frozen=True):
    """The renewals of ``signature``, of which one was requested after this call arrived, ``requested_before`` before.

    ``ttl_ms`` is the lifetime of the lease after a renewal. All is 0 from a master that was not elected.
    """

    signature: Signature = UNSIGNED
    requested_before: U64 = 0
    ttl_ms: U32 = 0

    @property
    def renewals(self) -> Renewals:
        """The renewals that prove the lease at the time of the call."""
        return Renewals(self.requested_before, Renewals.of(self.signature.renewals).confirmed)


class MastersRequest(FastMessage, frozen=True):
    """Request the owner of each range from any master. The caller's known map: 0 means none."""

    known_version: U64 = 0
    known_cluster: U64 = 0

    @classmethod
    def newer_than(cls, known: RangeMap | None) -> MastersRequest:
        """Request a map that replaces ``known``."""
        return cls() if known is None else cls(known.version, known.cluster)


#: Marks a range without an owner in ``MastersReply.owners``.
VACANT = 255


class MastersReply(FastMessage, frozen=True):
    """The map. For each range in order the number of its owner in ``addresses``, a byte in ``owners``, and its term.

    ``owners`` is empty if the caller's map is not older than this master's. ``key_scope`` is the prefix of the caller's
    keys, and part of what their ranges are computed from.
    """

    version: U64
    cluster: U64
    addresses: Sequence[str] = ()
    owners: bytes = b""
    terms: Sequence[U64] = ()
    key_scope: str = ""
    #: A map needs no proof: users of an old one learn that from the masters that it names.
    signature: ClassVar[Signature] = UNSIGNED

    def validate(self) -> None:
        """Refuse a map that lacks ranges, or names owners without an address."""
        owners, num_masters = self.owners, len(self.addresses)
        if not owners:
            return
        if len(owners) != NUM_RANGES or len(self.terms) != NUM_RANGES:
            raise InvalidRequest(f"a map has {NUM_RANGES} ranges; this one {len(owners)}, and {len(self.terms)} terms")
        if num_masters > NUM_RANGES or any(each >= num_masters and each != VACANT for each in owners):
            raise InvalidRequest(f"the map's owners are not among its {num_masters} addresses")

    @classmethod
    def of(cls, known: RangeMap, request: MastersRequest) -> MastersReply:
        """Return the answer of a master that knows the map ``known``."""
        if known.version and request.known_version >= known.version and request.known_cluster == known.cluster:
            return cls(known.version, known.cluster)
        addresses = list(dict.fromkeys(each for each in known.owners if each is not None))
        numbers: dict[Address | None, int] = {each: number for number, each in enumerate(addresses)}
        owners = bytes([numbers.get(each, VACANT) for each in known.owners])
        return cls(known.version, known.cluster, list(map(str, addresses)), owners, known.terms)

    @property
    def map(self) -> RangeMap | None:
        """The map in the reply; None: no later one is known. Raises InvalidRequest for an invalid address."""
        if not self.owners:
            return None
        addresses = list(map(Address.parse, self.addresses))
        owners = tuple(None if each == VACANT else addresses[each] for each in self.owners)
        return RangeMap(self.version, self.cluster, owners, tuple(self.terms))
