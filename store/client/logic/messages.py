"""The client's edge to the wire: calls to nodes and the master as messages, their answers as values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tanghulu.auth.credentials import Credentials
from tanghulu.errors import TanghuluError
from tanghulu.protos import directory_pb2, fastlane_pb2, store_pb2
from tanghulu.rpc.fast_client import Call, Reply
from tanghulu.rpc.frames import PROTOCOL_VERSION
from tanghulu.store.client.logic.effects import PeerId
from tanghulu.store.client.model import ChunkInfo, KeyInfo, NodeView
from tanghulu.store.protocol import packed_directory, packed_node, packed_stream
from tanghulu.store.protocol import packed_write_buffer as packed_desk
from tanghulu.store.protocol.checksums import Checksums
from tanghulu.store.protocol.packed_node import Found, Reservation
from tanghulu.store.protocol.shared_index import IndexPlace
from tanghulu.store.protocol.types import MAX_INLINE_BYTES, LastWord, NewChunk, Proclamation, Verdict
from tanghulu.store.protocol.wire import checksums_from_wire, index_from_wire, pin_from_wire, tier_from_wire
from tanghulu.store.protocol.write_buffer import DeskPlace
from tanghulu.transfer_engine.core.descriptor_wire import from_proto
from tanghulu.transfer_engine.core.segment import SegmentDescriptor

AnyCall = Call[Any]
AnyReply = Reply[Any]
_PUT, _GET = int(fastlane_pb2.METHOD_PUT), int(fastlane_pb2.METHOD_GET)
_PROCLAIM = int(fastlane_pb2.METHOD_PROCLAIM)
_STREAM, _SETTLE = int(fastlane_pb2.METHOD_STREAM), int(fastlane_pb2.METHOD_SETTLE)


# --- nodes


@dataclass(frozen=True, slots=True)
class Welcome:
    """A node's answer to HELLO."""

    instance_id: str
    session_id: int
    generation: int
    segment: SegmentDescriptor
    index: IndexPlace | None
    key_scope: str = ""


def hello(client_id: str, shown: Credentials, host_id: str, wants_shm: bool, held: Iterable[int]) -> AnyCall:
    """The first frame of a connection to a node."""
    request = store_pb2.HelloRequest(
        protocol_version=PROTOCOL_VERSION,
        client_id=client_id,
        tenant=shown.tenant,
        token=shown.token,
        host_id=host_id,
        wants_shm=wants_shm,
        held_lease_ids=held,
    )
    return Call(fastlane_pb2.METHOD_HELLO, request, store_pb2.HelloReply)


def welcome(reply: AnyReply) -> Welcome:
    """The answer to ``hello``."""
    message: store_pb2.HelloReply = reply.message
    segment, index = from_proto(message.segment), index_from_wire(message)
    return Welcome(message.instance_id, message.session_id, message.generation, segment, index, message.key_scope)


def put(items: Sequence[NewChunk], pieces: Sequence[memoryview], visible: bool, deadline_ms: int) -> AnyCall:
    """Small values, inside the request: ``pieces`` are all of them, one behind the other."""
    return Call(_PUT, packed_node.pack_put(items, visible, deadline_ms), bytes, pieces)


def stream(stream_id: int, new: NewChunk, pieces: Sequence[memoryview], visible: bool, deadline_ms: int) -> AnyCall:
    """A value that its checksum comes after."""
    request = packed_stream.StreamRequest(stream_id, new, visible, deadline_ms)
    return Call(_STREAM, packed_stream.pack_stream(request), bytes, pieces)


def settle(stream_id: int, word: LastWord, generation: int, checksums: Checksums) -> AnyCall:
    """The last word on a streamed value."""
    request = packed_stream.SettleRequest(stream_id, word, generation, checksums)
    return Call(_SETTLE, packed_stream.pack_settle(request), bytes)


def put_results(reply: AnyReply) -> list[bool | TanghuluError]:
    """For each value whether it existed, or why it failed; of PUT, STREAM and COMMIT."""
    return packed_node.unpack_outcomes(reply.message)


def desk(value_bytes: int) -> AnyCall:
    """A desk for values of about that size."""
    return Call(fastlane_pb2.METHOD_DESK, packed_desk.pack_desk_request(value_bytes), bytes)


def desk_place(reply: AnyReply) -> DeskPlace | None:
    """The answer to ``desk``."""
    return packed_desk.unpack_desk(reply.message)


def reserve(items: Iterable[NewChunk], deadline_ms: int) -> AnyCall:
    """Ranges for large values."""
    return Call(fastlane_pb2.METHOD_RESERVE, packed_node.pack_put(items, False, deadline_ms), bytes)


def reservations(reply: AnyReply) -> list[Reservation | TanghuluError | None]:
    """For each value its range; None: the key exists."""
    return packed_node.unpack_reservations(reply.message)


def commit(
    items: list[tuple[int, Checksums]],
    aborted: list[int],
    visible: bool,
    deadline_ms: int,
    num_proclaimed: int = 0,
    generation: int = 0,
) -> AnyCall:
    """(lease, checksums) that were written, those first that the master has accepted; and leases that were not."""
    request = packed_node.CommitRequest(items, aborted, visible, deadline_ms, num_proclaimed, generation)
    return Call(fastlane_pb2.METHOD_COMMIT, packed_node.pack_commit(request), bytes)


def get(keys: Sequence[str], max_inline_bytes: int = MAX_INLINE_BYTES, deadline_ms: int = 0) -> AnyCall:
    """Values, small ones inside the answer; ``deadline_ms``: how long to wait for those on an SSD, 0: some seconds."""
    return Call(_GET, packed_node.pack_get(packed_node.GetRequest(keys, max_inline_bytes, False, deadline_ms)), bytes)


def found(reply: AnyReply) -> list[tuple[Found, memoryview | None] | TanghuluError]:
    """The answer to ``get``, one per key; with the value where it came inline."""
    results: list[tuple[Found, memoryview | None] | TanghuluError] = []
    data, position = reply.attachment, 0
    for item in packed_node.unpack_found(reply.message):
        if isinstance(item, TanghuluError):
            results.append(item)
        elif item.lease_id:
            results.append((item, None))
        else:
            results.append((item, data[position : position + item.size_bytes]))
            position += item.size_bytes
    return results


def unpin(
    lease_ids: Sequence[int], bytes_read: int = 0, corrupt: Sequence[str] = (), read: Sequence[str] = ()
) -> AnyCall:
    """Leases that are not needed any more; keys whose bytes did not match; keys that were read without asking."""
    request = packed_node.UnpinRequest(lease_ids, bytes_read, corrupt, read)
    return Call(fastlane_pb2.METHOD_UNPIN, packed_node.pack_unpin(request), bytes)


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
    return Call(fastlane_pb2.METHOD_LOCATE, packed_directory.pack_locate(keys, count_only), bytes)


def locations(reply: AnyReply) -> tuple[list[tuple[tuple[PeerId, ...], int]], bool]:
    """(holders of each key, and how many of the first of them have it in memory; whether the master misses some)."""
    located, incomplete = packed_directory.unpack_located(reply.message)
    return [(tuple(map(PeerId, each.node_ids)), each.num_warm) for each in located], incomplete


def existence(reply: AnyReply) -> tuple[list[bool], bool]:
    """As ``locations``, where it only matters whether somebody holds the key."""
    return packed_directory.unpack_existence(reply.message)


def proclaim(said: Proclamation) -> AnyCall:
    """A chunk that lies in a desk."""
    return Call(_PROCLAIM, packed_desk.pack_proclaim(said), bytes)


def proclaim_many(said: Sequence[Proclamation]) -> AnyCall:
    """Several chunks that lie in desks of one node."""
    return Call(fastlane_pb2.METHOD_PROCLAIM_MANY, packed_desk.pack_proclaim_many(said), bytes)


def verdicts(reply: AnyReply) -> list[Verdict]:
    """The answer to ``proclaim_many``."""
    return packed_desk.unpack_verdicts(reply.message)


def verdict(reply: AnyReply) -> Verdict:
    """The answer to ``proclaim``."""
    return packed_desk.unpack_verdict(reply.message)


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
