"""The client's edge to the wire: calls to nodes and the master as messages, their answers as values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tanghulu.errors import ChunkNotFound, TanghuluError
from tanghulu.protos import directory_pb2, fastlane_pb2, store_pb2
from tanghulu.rpc.fast_client import Call, Reply
from tanghulu.rpc.frames import PROTOCOL_VERSION
from tanghulu.rpc.wire import error_of
from tanghulu.store.checksums import Checksums
from tanghulu.store.client.instructions import PeerId
from tanghulu.store.client.model import ChunkInfo, KeyInfo, NodeView
from tanghulu.store.shared_index import IndexPlace
from tanghulu.store.wire import (
    checksums_from_wire,
    checksums_to_wire,
    index_from_wire,
    new_chunk_to_wire,
    pin_from_wire,
    tier_from_wire,
)
from tanghulu.store.words import MAX_INLINE_BYTES, NewChunk
from tanghulu.transfer_engine.descriptor_wire import from_proto
from tanghulu.transfer_engine.segment import SegmentDescriptor

AnyCall = Call[Any]
AnyReply = Reply[Any]


# --- nodes


@dataclass(frozen=True, slots=True)
class Welcome:
    """A node's answer to HELLO."""

    instance_id: str
    session_id: int
    segment: SegmentDescriptor
    index: IndexPlace | None


def hello(client_id: str, tenant: str, token: str, host_id: str, wants_shm: bool, held: Iterable[int]) -> AnyCall:
    """The first frame of a connection to a node."""
    request = store_pb2.HelloRequest(
        protocol_version=PROTOCOL_VERSION,
        client_id=client_id,
        tenant=tenant,
        token=token,
        host_id=host_id,
        wants_shm=wants_shm,
        held_lease_ids=held,
    )
    return Call(fastlane_pb2.METHOD_HELLO, request, store_pb2.HelloReply)


def welcome(reply: AnyReply) -> Welcome:
    """The answer to ``hello``."""
    message: store_pb2.HelloReply = reply.message
    return Welcome(message.instance_id, message.session_id, from_proto(message.segment), index_from_wire(message))


def put(items: Sequence[tuple[NewChunk, memoryview]], visible: bool, deadline_ms: int) -> AnyCall:
    """Small values, inside the request."""
    request = store_pb2.PutRequest(
        items=[new_chunk_to_wire(new) for new, _ in items], visible=visible, deadline_ms=deadline_ms
    )
    return Call(fastlane_pb2.METHOD_PUT, request, store_pb2.PutReply, [value for _, value in items])


def put_results(reply: AnyReply) -> list[bool | TanghuluError]:
    """For each value whether it existed, or why it failed; of PUT and COMMIT."""
    return [error_of(result.status) or bool(result.existed) for result in reply.message.results]


@dataclass(frozen=True, slots=True)
class Reservation:
    """A range to write."""

    lease_id: int
    offset: int
    copies_only: bool


def reserve(items: Iterable[NewChunk], deadline_ms: int) -> AnyCall:
    """Ranges for large values."""
    request = store_pb2.ReserveRequest(items=[new_chunk_to_wire(new) for new in items], deadline_ms=deadline_ms)
    return Call(fastlane_pb2.METHOD_RESERVE, request, store_pb2.ReserveReply)


def reservations(reply: AnyReply) -> list[Reservation | TanghuluError | None]:
    """For each value its range; None: the key exists."""
    return [
        error_of(r.status) or (None if r.existed else Reservation(r.lease_id, r.offset, r.copies_only))
        for r in reply.message.reservations
    ]


def commit(items: Iterable[tuple[int, Checksums]], aborted: Iterable[int], visible: bool, deadline_ms: int) -> AnyCall:
    """(lease, checksums) that were written, and leases that were not."""
    request = store_pb2.CommitRequest(
        items=[store_pb2.CommitItem(lease_id=lease, checksums=checksums_to_wire(sums)) for lease, sums in items],
        aborted=aborted,
        visible=visible,
        deadline_ms=deadline_ms,
    )
    return Call(fastlane_pb2.METHOD_COMMIT, request, store_pb2.CommitReply)


@dataclass(slots=True)  # not frozen: one is made for every chunk read, and freezing costs microseconds
class Found:
    """A chunk on a node: ``value`` is there if it came inline, else ``lease_id`` pins ``offset``."""

    size_bytes: int
    version: int
    checksums: Checksums
    lease_id: int
    offset: int
    copies_only: bool
    value: memoryview | None


def get(keys: Sequence[str], max_inline_bytes: int = MAX_INLINE_BYTES, deadline_ms: int = 0) -> AnyCall:
    """Values, small ones inside the answer; ``deadline_ms``: how long to wait for those on an SSD, 0: some seconds."""
    request = store_pb2.GetRequest(keys=keys, max_inline_bytes=max_inline_bytes, deadline_ms=deadline_ms)
    return Call(fastlane_pb2.METHOD_GET, request, store_pb2.GetReply)


def found(reply: AnyReply) -> list[Found | TanghuluError]:
    """The answer to ``get``, one per key."""
    results: list[Found | TanghuluError] = []
    data, position = reply.attachment, 0
    for item in reply.message.items:
        size, lease_id = item.size_bytes, item.lease_id
        if not size:
            results.append(error_of(item.status) or ChunkNotFound("the node answered without a value"))
            continue
        sums = checksums_from_wire(item.checksums)
        if lease_id:
            results.append(Found(size, item.version, sums, lease_id, item.offset, item.copies_only, None))
            continue
        value = data[position : position + size]
        position += size
        results.append(Found(size, item.version, sums, 0, 0, False, value))
    return results


def unpin(
    lease_ids: Iterable[int], bytes_read: int = 0, corrupt: Iterable[str] = (), read: Iterable[str] = ()
) -> AnyCall:
    """Leases that are not needed any more; keys whose bytes did not match; keys that were read without asking."""
    request = store_pb2.UnpinRequest(lease_ids=lease_ids, bytes_read=bytes_read, corrupt=corrupt, read=read)
    return Call(fastlane_pb2.METHOD_UNPIN, request, store_pb2.UnpinReply)


def node_exists(keys: Sequence[str]) -> AnyCall:
    """Which keys the node itself has."""
    return Call(fastlane_pb2.METHOD_EXISTS, store_pb2.ExistsRequest(keys=keys), store_pb2.ExistsReply)


def remove(keys: Sequence[str]) -> AnyCall:
    """Drop chunks."""
    return Call(fastlane_pb2.METHOD_REMOVE, store_pb2.RemoveRequest(keys=keys), store_pb2.RemoveReply)


def eviction(policy: str) -> AnyCall:
    """Switch the node's eviction policy, or only ask for its name."""
    return Call(fastlane_pb2.METHOD_EVICTION, store_pb2.EvictionRequest(policy=policy), store_pb2.EvictionReply)


def eviction_policy(reply: AnyReply) -> str:
    """The answer to ``eviction``."""
    return str(reply.message.policy)


def node_stat(keys: Sequence[str]) -> AnyCall:
    """What the node knows of chunks."""
    return Call(fastlane_pb2.METHOD_CHUNK_STAT, store_pb2.StatRequest(keys=keys), store_pb2.StatReply)


def chunk_info(key: str, nodes: tuple[str, ...], reply: AnyReply) -> ChunkInfo | None:
    """The answer to ``node_stat`` for one key; None: not there."""
    chunk: store_pb2.ChunkStat = reply.message.chunks[0]
    if not chunk.found:
        return None
    return ChunkInfo(
        key,
        chunk.size_bytes,
        chunk.version,
        nodes,
        checksums_from_wire(chunk.checksums),
        pin_from_wire(chunk.pin),
        chunk.num_leases,
        chunk.age_s,
        chunk.num_hits,
        tier_from_wire(chunk.tier),
        chunk.replicas or 1,
        chunk.ttl_ms / 1000 if chunk.ttl_ms else None,
    )


# --- master


def locate(keys: Sequence[str], *, count_only: bool = False) -> AnyCall:
    """Who holds these keys."""
    request = directory_pb2.LocateRequest(keys=keys, count_only=count_only)
    return Call(fastlane_pb2.METHOD_LOCATE, request, directory_pb2.LocateReply)


def locations(reply: AnyReply) -> tuple[list[tuple[PeerId, ...]], bool]:
    """(holders of each key, whether the master cannot yet tell that a key is nowhere)."""
    message: directory_pb2.LocateReply = reply.message
    ids = [PeerId(node_id) for node_id in message.node_ids]
    return [tuple(ids[i] for i in location.nodes) for location in message.locations], message.incomplete


def existence(reply: AnyReply) -> tuple[list[bool], bool]:
    """As ``locations``, where it only matters whether somebody holds the key."""
    return list(map(bool, reply.message.found)), reply.message.incomplete


def nodes() -> AnyCall:
    """All nodes."""
    return Call(fastlane_pb2.METHOD_NODES, directory_pb2.NodesRequest(), directory_pb2.NodesReply)


def place(size_bytes: int, replicas: int, prefer_node: str, client_place: str) -> AnyCall:
    """Where to put a value."""
    request = directory_pb2.PlaceRequest(
        size_bytes=size_bytes, replicas=replicas, prefer_node=prefer_node, client_place=client_place
    )
    return Call(fastlane_pb2.METHOD_PLACE, request, directory_pb2.PlaceReply)


def node_views(reply: AnyReply) -> list[NodeView]:
    """The nodes in the answer to ``nodes`` or ``place``."""
    return [
        NodeView(
            node.instance.id,
            node.instance.address,
            node.instance.unix_path,
            node.instance.metrics_address,
            node.instance.place,
            node.instance.attributes.get("host_id", ""),
            node.capacity_bytes,
            node.used_bytes,
            node.num_chunks,
            node.draining,
            node.last_seen_s,
            node.ssd_capacity_bytes,
            node.ssd_used_bytes,
            node.num_unsafe,
            node.drained,
        )
        for node in reply.message.nodes
    ]


def is_rebuilding(reply: AnyReply) -> bool:
    """Whether the master that answered ``nodes`` may not know all of them yet."""
    return bool(reply.message.rebuilding)


def list_keys(prefix: str, after: str, limit: int) -> AnyCall:
    """A page of keys."""
    request = directory_pb2.ListKeysRequest(prefix=prefix, after=after, limit=limit)
    return Call(fastlane_pb2.METHOD_LIST_KEYS, request, directory_pb2.ListKeysReply)


def key_page(reply: AnyReply) -> tuple[list[KeyInfo], bool]:
    """The answer to ``list_keys``: (keys, whether there are more)."""
    message: directory_pb2.ListKeysReply = reply.message
    return [KeyInfo(k.key, k.size_bytes, k.version, tuple(k.node_ids)) for k in message.keys], message.more
