"""The room's batches, and the switching of policies, in one process and over the wire."""

from __future__ import annotations

import pytest

import tanghulu
from tanghulu.errors import InvalidRequest
from tanghulu.eviction import POLICIES, make_policy
from tanghulu.store.node.space.allocator import OffsetAllocator
from tanghulu.store.node.space.space import Space
from tanghulu.store.node.state.chunk import Chunk, ChunkEvent
from tanghulu.store.node.state.chunk_table import ChunkTable
from tanghulu.store.protocol.checksums import NO_CHECKSUMS
from tanghulu.store.protocol.types import Pin
from tanghulu.types import ChunkKey
from tests.store.cluster import Cluster


def full_room(policy: str, pins: list[Pin]) -> tuple[Space, list[Chunk]]:
    """A room with a LIVE chunk for each of ``pins``, all put by one call."""
    table = ChunkTable()
    room = Space(OffsetAllocator(1 << 20), table, lambda: make_policy(policy))
    chunks = []
    for i, pin in enumerate(pins):
        offset = room.allocator.allocate(4096)
        assert offset is not None
        chunk = Chunk.reserved(ChunkKey(f"k{i}"), 1, offset, 4096, NO_CHECKSUMS, pin, 0.0)
        table.enter(chunk)
        table.publish(chunk, ChunkEvent.COMMIT_UNSEEN)
        room.settle(chunk)
        chunks.append(chunk)
    room.end_batch()
    return room, chunks


def test_what_one_call_brought_goes_tail_first() -> None:
    room, chunks = full_room("lru", [Pin.NONE] * 4)
    assert list(room.victims()) == chunks[::-1]
    for chunk in chunks[:2]:
        room.touch(chunk)
    assert list(room.victims()) == [chunks[3], chunks[2], chunks[1], chunks[0]]
    room.check()


@pytest.mark.parametrize("after", sorted(POLICIES))
def test_a_switch_keeps_every_chunk_and_the_order(after: str) -> None:
    pins = [Pin.NONE, Pin.SOFT, Pin.HARD, Pin.NONE, Pin.SOFT, Pin.NONE]
    room, chunks = full_room("lru", pins)
    before = list(room.victims())
    assert before == [chunks[i] for i in (5, 3, 0, 4, 1)]
    room.switch_policy(lambda: make_policy(after))
    assert room.policy_name == after
    room.check()
    assert list(room.victims())[:2] == before[:2]
    assert set(room.victims()) == set(before)


def test_a_client_switches_a_running_node() -> None:
    with Cluster(1, "16MiB") as cluster, tanghulu.connect(cluster.address) as client:
        (node,) = (view.id for view in client.nodes())
        assert client.eviction_policy(node) == "reuse"
        for i in range(10):
            client.put(f"k{i}", bytes(1 << 20))
        for name in (*POLICIES, "reuse"):
            assert client.eviction_policy(node, name) == name
            assert client.eviction_policy(node) == name
            assert all(client.exists_many([f"k{i}" for i in range(10)]))
        for i in range(40):
            client.put(f"new{i}", bytes(1 << 20))
        assert cluster.nodes[0].metric("tanghulu_node_evictions_total") > 20
        with pytest.raises(InvalidRequest, match="s3-fifo"):
            client.eviction_policy(node, "belady")
        with pytest.raises(InvalidRequest, match=node):
            client.eviction_policy("nobody", "lru")
        assert client.eviction_policy(node) == "reuse"
