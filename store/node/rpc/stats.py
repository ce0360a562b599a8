"""The node's edge for questions about chunks: what it knows of each, for both carriers."""

from __future__ import annotations

from tanghulu.errors import InvalidRequest
from tanghulu.protos import store_pb2
from tanghulu.store.node.state.node_chunks import NodeChunks
from tanghulu.store.node.state.ssd_chunk import SsdChunk
from tanghulu.store.protocol.wire import checksums_to_wire, fill_checksums, pin_to_wire, tier_to_wire
from tanghulu.types import ChunkKey

MAX_KEYS_PER_CALL = 65536


def check_count(num_keys: int) -> None:
    """Raise InvalidRequest for more keys than one call may have."""
    if num_keys > MAX_KEYS_PER_CALL:
        raise InvalidRequest(f"{num_keys} keys in one call are more than {MAX_KEYS_PER_CALL}; send them in several")


def stat_reply(chunks: NodeChunks, request: store_pb2.StatRequest) -> store_pb2.StatReply:
    """The answer to CHUNK_STAT, for both carriers."""
    check_count(len(request.keys))
    reply = store_pb2.StatReply()
    for key in request.keys:
        chunk = chunks.find(ChunkKey(key))
        if chunk is None:
            entry = chunks.find_below(ChunkKey(key))
            _add_below(reply, entry, None if entry is None else chunks.left_s(entry))
            continue
        reply.chunks.add(
            found=True,
            size_bytes=chunk.size_bytes,
            version=chunk.version,
            checksums=checksums_to_wire(chunk.checksums),
            pin=pin_to_wire(chunk.pin),
            num_leases=chunk.num_leases,
            age_s=chunks.age_s(chunk),
            num_hits=chunk.num_hits,
            replicas=chunk.replicas,
            ttl_ms=chunk.left_ms(chunks.age_s(chunk)),
        )
    return reply


def _add_below(reply: store_pb2.StatReply, entry: SsdChunk | None, left_s: float | None) -> None:
    stat = reply.chunks.add()
    if entry is not None:
        stat.found, stat.size_bytes, stat.version = True, entry.size_bytes, entry.version
        stat.pin, stat.tier = pin_to_wire(entry.pin), tier_to_wire(entry.tier)
        stat.replicas, stat.ttl_ms = entry.replicas, 0 if left_s is None else max(1, round(left_s * 1000))
        fill_checksums(stat.checksums, entry.checksums)
