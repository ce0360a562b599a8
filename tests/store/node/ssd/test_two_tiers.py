"""A node's decisions over two tiers: what the master hears, and what does not come back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from tanghulu.errors import ChunkNotFound
from tanghulu.eviction import make_policy
from tanghulu.eviction.base import Policy
from tanghulu.store.node.ssd.admission import TierAdmission
from tanghulu.store.node.ssd.state import Instruction, LostChunk, TierState
from tanghulu.store.node.state.chunk import Chunk
from tanghulu.store.node.state.node_state import NodeState, make_node_state
from tanghulu.store.node.state.outcomes import CommittedBy, Existed, Reserved
from tanghulu.store.node.state.ssd_chunk import SsdChunk, SsdChunkState
from tanghulu.store.node.state.ssd_record import UNIT, SsdRecord
from tanghulu.store.protocol.checksums import Checksums
from tanghulu.store.protocol.types import NewChunk, Pin, Tier
from tanghulu.transfer_engine.core.access import AccessTable
from tanghulu.types import ChunkKey
from tests.store.node.rig import reserve_or_wait
from tests.virtual.clock import ManualClock

NUM_IN_MEMORY, NUM_BELOW = 8, 16


class InstantTier:
    """A LowerTier whose writes succeed at once."""

    def __init__(self, clock: ManualClock, on_lost: Callable[[SsdChunk], None]) -> None:
        self.state = TierState(
            NUM_BELOW * UNIT, lambda: make_policy("lru"), TierAdmission("all", NUM_BELOW * UNIT), clock
        )
        self.capacity_bytes, self.used_bytes = self.state.capacity_bytes, 0
        self.free_queue_bytes = NUM_BELOW * UNIT
        self.find, self.entries, self.touch = self.state.find, self.state.entries, self.state.touch
        self._on_lost = on_lost

    def demote(self, chunk: Chunk, left_s: float | None) -> SsdChunk | None:
        record = SsdRecord(chunk.key, chunk.version, chunk.size_bytes, chunk.checksums, chunk.pin)
        entry, instructions = self.state.evicted(record, chunk.expires_s, chunk.num_hits, UNIT)
        self._perform(instructions)
        if entry is not None and entry.state is SsdChunkState.WRITING:
            self.state.written(entry, ok=True)
        return entry

    def drop(self, entry: SsdChunk) -> None:
        self._perform(self.state.drop(entry))

    def expire(self, now_s: float) -> None:
        self._perform(self.state.expire(now_s))

    def switch_policy(self, make_policy: Callable[[], Policy]) -> None:
        self.state.switch_policy(make_policy)

    def _perform(self, instructions: list[Instruction]) -> None:
        for each in instructions:
            if isinstance(each, LostChunk):
                self._on_lost(each.entry)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def node(clock: ManualClock) -> NodeState:
    access = AccessTable(clock, 1000, 0)
    make_tier = partial(InstantTier, clock)
    return make_node_state(NUM_IN_MEMORY * 64, access, lambda: make_policy("lru"), clock, make_tier=make_tier)


def put(
    node: NodeState, key: str, version: int = 1, ttl_s: float | None = None, pin: Pin = Pin.NONE
) -> Reserved | Existed:
    new = NewChunk(ChunkKey(key), version, 64, Checksums(0, (1,)), pin, ttl_s=ttl_s)
    outcome = reserve_or_wait(node, new, None)
    if isinstance(outcome, Reserved):
        outcome = node.commit(outcome.chunk, new.checksums, CommittedBy.NODE_UNAWAITED)
    assert isinstance(outcome, Reserved | Existed)
    node.check()
    return outcome


def told(node: NodeState) -> tuple[dict[str, Tier], set[str], set[str]]:
    """What the master hears next: (added with their tiers, removed, deleted)."""
    message = node.reports.leader.take()
    node.reports.leader.done()
    return (
        {str(c.key): c.tier for c in message.added},
        {str(k) for k, _ in message.removed},
        {str(k) for k, _ in message.deleted},
    )


def below(node: NodeState, key: str) -> SsdChunk:
    entry = node.chunks.tier.find(ChunkKey(key))
    assert entry is not None
    return entry


def promote(node: NodeState, entry: SsdChunk) -> Chunk:
    chunk = node.reserve_promotion(entry)
    assert chunk is not None
    live = node.promote(chunk, entry)
    node.check()
    return live


def test_an_evicted_chunk_is_held_below_and_lost_only_when_it_leaves_there_too(node: NodeState) -> None:
    for i in range(NUM_IN_MEMORY):
        put(node, f"k{i}")
    told(node)
    put(node, "more")
    assert told(node) == ({"k0": Tier.SSD, "more": Tier.MEMORY}, set(), set())
    assert node.chunks.holds(ChunkKey("k0"))
    assert node.chunks.find(ChunkKey("k0")) is None
    for i in range(NUM_BELOW):
        put(node, f"n{i}")
    added, removed, _ = told(node)
    assert removed == {"k0"}, "the first to go down is the first to go"
    assert added["k1"] is Tier.SSD
    assert set(node.chunks.all_keys()) == {*added, "more"} | {f"k{i}" for i in range(1, 8)}


def test_a_put_of_a_key_that_is_below_is_a_hit(node: NodeState) -> None:
    for i in range(NUM_IN_MEMORY + 1):
        put(node, f"k{i}")
    outcome = put(node, "k0", version=2)
    assert isinstance(outcome, Existed)
    assert outcome.chunk is below(node, "k0")


def test_a_chunk_comes_up_and_goes_down_again_without_a_write(node: NodeState) -> None:
    for i in range(NUM_IN_MEMORY + 1):
        put(node, f"k{i}")
    told(node)
    chunk = promote(node, below(node, "k0"))
    assert node.chunks.find(ChunkKey("k0")) is chunk
    added, removed, _ = told(node)
    assert added["k0"] is Tier.MEMORY
    assert not removed
    node.chunks.evict(chunk)
    node.check()
    assert told(node)[0]["k0"] is Tier.SSD


def test_what_is_pinned_hard_comes_up_as_that_within_the_limit_and_stays_below_beyond_it(node: NodeState) -> None:
    """A quarter of the memory. The node has ended meanwhile, and others were pinned before the first came up."""
    for i in range(2):
        put(node, f"hard{i}", pin=Pin.HARD)
    for i in range(2):
        chunk = node.chunks.find(ChunkKey(f"hard{i}"))
        assert chunk is not None
        node.chunks.evict(chunk)
    put(node, "other", pin=Pin.HARD)
    first, second = promote(node, below(node, "hard0")), promote(node, below(node, "hard1"))
    assert (first.pin, second.pin) == (Pin.HARD, Pin.SOFT)
    for i in range(3 * NUM_IN_MEMORY + NUM_BELOW):
        put(node, f"k{i}")
    assert node.chunks.find(ChunkKey("hard0")) is first
    node.chunks.evict(second)
    assert promote(node, below(node, "hard1")).pin is Pin.SOFT
    assert node.chunks.remove(ChunkKey("hard1"))
    assert not node.chunks.holds(ChunkKey("hard1"))
    node.check()


def test_what_is_removed_on_its_way_up_stays_away(node: NodeState) -> None:
    for i in range(NUM_IN_MEMORY + 1):
        put(node, f"k{i}")
    entry = below(node, "k0")
    chunk = node.reserve_promotion(entry)
    assert chunk is not None
    assert node.chunks.remove(ChunkKey("k0"))
    with pytest.raises(ChunkNotFound):
        node.promote(chunk, entry)
    node.check()
    assert not node.chunks.holds(ChunkKey("k0"))
    assert "k0" in told(node)[2]
    assert not node.chunks.remove(ChunkKey("k0"))


def test_removal_refusal_and_time_end_both_copies(node: NodeState, clock: ManualClock) -> None:
    for i in range(NUM_IN_MEMORY + 3):
        put(node, f"k{i}", ttl_s=10.0 if i == 2 else None)
    for key in ("k0", "k1"):
        promote(node, below(node, key))
    told(node)
    assert node.chunks.remove(ChunkKey("k0"))
    refused = node.chunks.find(ChunkKey("k1"))
    assert refused is not None
    node.reported(refused, accepted=False)
    clock.advance(10.0)
    node.expire(clock.now_s())
    node.check()
    assert not any(node.chunks.holds(ChunkKey(key)) for key in ("k0", "k1", "k2"))
    assert "k2" in told(node)[1]


def test_a_corrupt_chunk_leaves_its_copy_below(node: NodeState) -> None:
    for i in range(NUM_IN_MEMORY + 1):
        put(node, f"k{i}")
    chunk = promote(node, below(node, "k0"))
    told(node)
    node.chunks.drop_corrupt(chunk)
    node.check()
    assert node.chunks.holds(ChunkKey("k0"))
    assert told(node) == ({"k0": Tier.SSD}, set(), set())
