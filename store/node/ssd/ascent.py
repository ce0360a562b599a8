"""The decisions about a chunk that comes back up from the SSD: its range in memory, and whether it may go live."""

from __future__ import annotations

from tanghulu.errors import ChunkNotFound
from tanghulu.store.node.state.chunk import Chunk, ChunkEvent
from tanghulu.store.node.state.limits import may_pin_hard
from tanghulu.store.node.state.node_state import NodeState
from tanghulu.store.node.state.ssd_chunk import TierEntry
from tanghulu.store.protocol.types import NewChunk, Pin


def reserve(state: NodeState, entry: TierEntry, *, sparing: bool) -> Chunk | None:
    """A range for ``entry``; None if leases leave no room. ``sparing``: see Room.take.

    What is pinned hard beyond the limit (memory became smaller, or others were pinned meanwhile) is pinned softly here;
    below it stays as it is.
    """
    left_s, pin = state.left_s(entry), entry.pin
    if pin is Pin.HARD and not may_pin_hard(entry.size_bytes, state.capacity_bytes, state.table.hard_pinned_bytes):
        pin = Pin.SOFT
    new = NewChunk(entry.key, entry.version, entry.size_bytes, entry.checksums, pin, left_s, entry.replicas)
    reserved = state.try_reserve(new, None, sparing=sparing)
    return None if reserved is None else reserved.chunk


def commit(state: NodeState, chunk: Chunk, entry: TierEntry) -> Chunk:
    """The bytes of ``entry`` are in place; the chunk that serves its key now. Raises ChunkNotFound if it is gone.

    What was removed while it was read does not come back.
    """
    existing = state.standing(chunk.key)
    if existing is not None or not entry.held:
        state.abandon(chunk)
        if existing is None:
            raise ChunkNotFound(f"{chunk.key!r} was dropped on its way up")
        return existing
    state.table.publish(chunk, ChunkEvent.COMMIT_UNSEEN)
    state.room.settle(chunk)
    state.room.end_batch()
    state.announcements.add(chunk)
    return chunk
