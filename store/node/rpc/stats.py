"""Questions about a node's chunks: a description of each, and the number of keys allowed per call."""

from __future__ import annotations

from tanghulu.errors import InvalidRequest
from tanghulu.store.node.state.node_chunks import NodeChunks
from tanghulu.store.protocol.messages import ChunkInfo
from tanghulu.types import ChunkKey

MAX_KEYS_PER_CALL = 65536


def check_count(num_keys: int) -> None:
    """Raise InvalidRequest for more keys than one call may have."""
    if num_keys > MAX_KEYS_PER_CALL:
        raise InvalidRequest(f"{num_keys} keys in one call are more than {MAX_KEYS_PER_CALL}; send them in several")


def chunk_info(chunks: NodeChunks, key: ChunkKey) -> ChunkInfo | None:
    """Return the chunk, in memory or on the SSD; None if it is not here."""
    chunk = chunks.find(key)
    held = chunk or chunks.find_below(key)
    if held is None:
        return None
    num_leases, age_s, num_hits = (
        (0, 0.0, 0) if chunk is None else (chunk.num_leases, chunks.age_s(chunk), chunk.num_hits)
    )
    left_s = chunks.left_s(held)
    return ChunkInfo(
        "",
        held.size_bytes,
        held.version,
        (),
        held.checksums,
        held.pin,
        num_leases,
        age_s,
        num_hits,
        held.tier,
        held.replicas,
        None if left_s is None else max(0.001, round(left_s, 3)),
    )
