"""Conversion between the directory's values and their protobuf messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from tanghulu.discovery.base import Instance
from tanghulu.discovery.instance_wire import instance_to_proto
from tanghulu.errors import InvalidRequest
from tanghulu.protos import common_pb2
from tanghulu.protos import directory_pb2 as pb
from tanghulu.store.master.directory.announcement import (
    ChunkEntry,
    NodeAnnouncement,
    Removal,
    ReportPiece,
    Retraction,
)
from tanghulu.store.master.directory.chunk_table import FoundChunk
from tanghulu.store.master.directory.listing import KeyListing
from tanghulu.store.master.directory.nodes import NodeSummary
from tanghulu.store.master.directory.placement import MAX_REPLICAS, PlacementRequest
from tanghulu.store.master.replication.orders import Copy, Drop
from tanghulu.store.master.replication.planner import Progress
from tanghulu.store.protocol.directory_events import DirectoryEvent, DirectoryEventKind
from tanghulu.store.protocol.key_slots import ALL_BITS
from tanghulu.store.protocol.messages import LocateReply
from tanghulu.types import MAX_KEY_BYTES, MAX_VALUE_BYTES, Place

MAX_KEYS_PER_CALL = 1 << 16
DEFAULT_LIST_LIMIT = 1000
MAX_LIST_LIMIT = 10_000

_KINDS = {
    DirectoryEventKind.STORED: pb.DirectoryEvent.STORED,
    DirectoryEventKind.REMOVED: pb.DirectoryEvent.REMOVED,
    DirectoryEventKind.NODE_GONE: pb.DirectoryEvent.NODE_GONE,
    DirectoryEventKind.SYNCED: pb.DirectoryEvent.SYNCED,
    DirectoryEventKind.RESET: pb.DirectoryEvent.RESET,
    DirectoryEventKind.MOVED: pb.DirectoryEvent.MOVED,
}


def announcement_from_wire(request: pb.AnnounceRequest) -> NodeAnnouncement:
    """What a node says; raises InvalidRequest for a key or size out of bounds."""
    check_count(len(request.added) + len(request.removed) + len(request.deleted) + len(request.withdrawn))
    announcement = NodeAnnouncement(
        node_id=request.node_id,
        generation=request.generation,
        added=[_entry(chunk) for chunk in request.added],
        removed=_removals(request.removed, request.removed_versions),
        deleted=_removals(request.deleted, request.deleted_versions),
        retracted=[Retraction(each.key, each.version) for each in request.withdrawn],
        piece=_piece(request),
        report_id=request.report_id,
        capacity_bytes=request.capacity_bytes,
        used_bytes=request.used_bytes,
        ssd_capacity_bytes=request.ssd_capacity_bytes,
        ssd_used_bytes=request.ssd_used_bytes,
        ranges=frozenset(each.number for each in request.ranges) if request.ranges else None,
        told=request.owned if request.map_version else ALL_BITS,
    )
    if request.HasField("news"):
        news = request.news
        announcement.replicated = [(each.key, min(each.replicas, MAX_REPLICAS)) for each in news.replicated]
        announcement.quiet = news.quiet
        announcement.hot = [(each.key, each.num_gets) for each in news.hot]
        announcement.failed_copies = news.failed
    return announcement


def _removals(keys: Sequence[str], versions: Sequence[int]) -> list[Removal]:
    if len(versions) != len(keys):
        raise InvalidRequest(f"{len(keys)} removed keys have {len(versions)} versions; each needs one")
    return list(map(Removal, keys, versions))


def _piece(request: pb.AnnounceRequest) -> ReportPiece | None:
    if not request.HasField("piece"):
        return None
    piece = request.piece
    keys, cold = list(piece.keys), piece.cold or bytes(len(piece.keys))
    check_count(len(keys))
    if not len(keys) == len(piece.versions) == len(piece.sizes) == len(cold):
        raise InvalidRequest(f"a report's piece of {len(keys)} keys does not have a version and a size for each")
    if keys and not 0 < min(map(len, keys)) <= max(map(len, keys)) <= MAX_KEY_BYTES:
        raise InvalidRequest(f"a report names a key that does not have 1..{MAX_KEY_BYTES} characters")
    if keys and max(piece.sizes) > MAX_VALUE_BYTES:
        raise InvalidRequest(f"a report names a chunk of {max(piece.sizes)} bytes, more than {MAX_VALUE_BYTES}")
    entries = list(zip(keys, piece.versions, piece.sizes, cold, strict=True))
    return ReportPiece(piece.number, piece.next_slot, entries)


def _entry(chunk: pb.ChunkEntry) -> ChunkEntry:
    key, size_bytes = chunk.key, chunk.size_bytes
    if not 0 < len(key) <= MAX_KEY_BYTES:
        raise InvalidRequest(f"a key of {len(key)} characters is not within 1..{MAX_KEY_BYTES}")
    if size_bytes > MAX_VALUE_BYTES:
        raise InvalidRequest(f"chunk {key!r} of {size_bytes} bytes is larger than {MAX_VALUE_BYTES}")
    return ChunkEntry(key, chunk.version, size_bytes, chunk.tier == common_pb2.TIER_SSD, chunk.unconfirmed)


def named_keys(announcement: NodeAnnouncement) -> Iterator[str]:
    """All keys of which a node says that it holds their chunks, or does no longer."""
    yield from (entry.key for entry in announcement.added)
    yield from (removal.key for removal in chain(announcement.removed, announcement.deleted))
    yield from (retraction.key for retraction in announcement.retracted)
    if announcement.piece is not None:
        for told in announcement.piece.entries:
            yield told[0]


def add_orders(
    reply: pb.AnnounceReply, copies: Iterable[Copy], drops: Iterable[Drop], instance: Callable[[str], Instance | None]
) -> None:
    """What the node is to do, into the answer to its announcement; ``instance`` finds the sources."""
    sources: set[str] = set()
    for copy in copies:
        reply.copies.add(key=copy.key, version=copy.version, size_bytes=copy.size_bytes, source=copy.source)
        sources.add(copy.source)
    for source in sources:
        found = instance(source)
        if found is not None:
            reply.sources.append(instance_to_proto(found))
    for drop in drops:
        reply.drops.add(key=drop.key, version=drop.version, removed=drop.removed)


def check_count(num_keys: int) -> None:
    """Raise InvalidRequest for too many keys in one call."""
    if num_keys > MAX_KEYS_PER_CALL:
        raise InvalidRequest(f"{num_keys} keys in one call are more than {MAX_KEYS_PER_CALL}; send them in several")


def locate_to_wire(found: Iterable[FoundChunk | None], *, incomplete: bool) -> pb.LocateReply:
    """The answer to LOCATE: node ids once, locations by their index."""
    reply = pb.LocateReply(incomplete=incomplete)
    indexes: dict[str, int] = {}
    add = reply.locations.add
    for chunk in found:
        if chunk is None:
            add()
            continue
        version, size_bytes, node_ids, num_warm = chunk
        nodes = [indexes.setdefault(node_id, len(indexes)) for node_id in node_ids]
        add(nodes=nodes, version=version, size_bytes=size_bytes, num_warm=num_warm)
    reply.node_ids.extend(indexes)
    return reply


def located_to_wire(reply: LocateReply) -> pb.LocateReply:
    """The answer to LOCATE of the fast lane as one of gRPC."""
    if not reply.locations:
        return pb.LocateReply(found=reply.found, incomplete=reply.incomplete)
    found = (
        None if each is None else FoundChunk(each.version, each.size_bytes, each.node_ids, each.num_warm)
        for each in reply.locations
    )
    return locate_to_wire(found, incomplete=reply.incomplete)


def placement_from_wire(request: pb.PlaceRequest) -> PlacementRequest:
    """What is to be placed; raises InvalidRequest for a place that is none."""
    client_place = Place.parse(request.client_place) if request.client_place else None
    return PlacementRequest(request.size_bytes, request.replicas or 1, request.prefer_node, client_place)


def nodes_to_wire(
    nodes: Iterable[NodeSummary], now_s: float, progress: Callable[[str], Progress] | None = None
) -> list[pb.NodeInfo]:
    """Nodes as messages; ``last_seen_s`` becomes an age. ``progress`` tells of the draining ones."""
    messages: list[pb.NodeInfo] = []
    for node in nodes:
        message = pb.NodeInfo(
            instance=instance_to_proto(node.instance),
            capacity_bytes=node.capacity_bytes,
            used_bytes=node.used_bytes,
            num_chunks=node.num_chunks,
            draining=node.draining,
            last_seen_s=max(now_s - node.last_seen_s, 0.0),
            ssd_capacity_bytes=node.ssd_capacity_bytes,
            ssd_used_bytes=node.ssd_used_bytes,
        )
        if node.draining and progress is not None:
            message.num_unsafe, message.drained = progress(node.instance.id)
        messages.append(message)
    return messages


def list_limit(request: pb.ListKeysRequest) -> int:
    """How many keys a page may have."""
    return min(request.limit or DEFAULT_LIST_LIMIT, MAX_LIST_LIMIT)


def listed_to_wire(listed: KeyListing) -> pb.KeyInfo:
    """One key of a listing."""
    key, found = listed
    return pb.KeyInfo(key=key, size_bytes=found.size_bytes, version=found.version, node_ids=found.node_ids)


def event_to_wire(event: DirectoryEvent) -> pb.DirectoryEvent:
    """One event for followers."""
    told = pb.DirectoryEvent(sequence=event.sequence, kind=_KINDS[event.kind], node_id=event.node_id, keys=event.keys)
    if event.ranges:
        told.ranges = event.ranges
    return told
