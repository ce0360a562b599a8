"""Values of mixed sizes: who goes, what is moved, and that every byte stays what was put; ``check()`` at every step."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tanghulu.auth.tenants import Tenant
from tanghulu.errors import Overloaded, StoreFull, TanghuluError
from tanghulu.eviction import Policy, make_policy
from tanghulu.store.node.space import space
from tanghulu.store.node.state.chunk import Chunk
from tanghulu.store.node.state.chunk_table import Published
from tanghulu.store.node.state.node_state import make_node_state
from tanghulu.store.node.state.outcomes import CommittedBy, Existed, Reserved, Waiter, WaitQueue
from tanghulu.store.node.state.tenant_usage import Policies, TenantUsage
from tanghulu.store.protocol.shared_index import IndexPlace, IndexReader, IndexWriter, index_bytes
from tanghulu.store.protocol.types import NewChunk, Pin
from tanghulu.transfer_engine.core.access import AccessTable
from tanghulu.types import ChunkKey
from tests.store.node.rig import COPIES, MAPS, SUM, Outcome, finished, new, reserve_or_wait
from tests.virtual.clock import ManualClock

CAPACITY = 1 << 16
SMALL = 256
NUM_SMALL = CAPACITY // SMALL
NUM_BUCKETS = 256
SEED = 7


class Node:
    """A node's decisions over real bytes, and a shared index of them."""

    def __init__(self, tenants: TenantUsage | None = None) -> None:
        self.clock = ManualClock()
        self.memory = memoryview(bytearray(CAPACITY + index_bytes(NUM_BUCKETS)))
        access = AccessTable(self.clock, 1000, CAPACITY)
        access.open_session(1, None)
        access.open_session(2, 4242)

        def policy() -> Policy:
            return make_policy("lru") if tenants is None else Policies.fair(tenants).memory("lru")

        published = Published(IndexWriter(self.memory[CAPACITY:], SEED, 0.0))
        self.index = IndexReader(self.memory, self.memory, IndexPlace(CAPACITY, NUM_BUCKETS, SEED))
        self.state = make_node_state(
            CAPACITY,
            access,
            policy,
            self.clock,
            published=published,
            tenants=tenants,
            buffer_memory=(self.memory, None),
        )
        self.bytes: dict[int, bytes] = {}  # by version
        self._version = 0

    def new(self, key: str, size: int, pin: Pin = Pin.NONE, ttl_s: float | None = None) -> NewChunk:
        self._version += 1
        self.bytes[self._version] = random.Random(self._version).randbytes(size)
        return NewChunk(ChunkKey(key), self._version, size, SUM, pin, ttl_s)

    def put(self, key: str, size: int, pin: Pin = Pin.NONE) -> Chunk:
        outcome = reserve_or_wait(self.state, self.new(key, size, pin), None)
        outcome = finished(self.state, outcome)
        assert isinstance(outcome, Reserved), outcome
        self.fill(outcome)
        return outcome.chunk

    def fill(self, reserved: Reserved) -> None:
        chunk = reserved.chunk
        self.memory[chunk.offset : chunk.offset + chunk.size_bytes] = self.bytes[chunk.version]
        if reserved.lease_id:
            self.state.leases.end_writing(reserved.lease_id, 1)
        self.state.commit(chunk, SUM, CommittedBy.NODE_UNAWAITED)
        self.state.chunks.end_call()

    def check(self) -> None:
        for chunk in [each for each in self.state.chunks.table if each.held]:
            entry = self.index.find(chunk.key, 0.0)
            assert entry is None or (entry.version, entry.offset) == (chunk.version, chunk.offset), "a stale entry"
        self.state.check()
        for chunk in self.state.chunks.table:
            if chunk.held:
                bytes_there = self.memory[chunk.offset : chunk.offset + chunk.size_bytes]
                assert bytes_there == self.bytes[chunk.version], f"{chunk!r} holds other bytes"

    def found(self, key: str) -> Chunk:
        chunk = self.state.chunks.find(ChunkKey(key))
        assert chunk is not None, key
        return chunk

    def names(self) -> set[str]:
        return set(self.state.chunks.table.keys())


def scattered(node: Node, name: Callable[[int], str] = "k{}".format, seed: int = 1) -> list[str]:
    """Fill the node with small chunks that were used in random order; their keys, the oldest first."""
    order = [name(i) for i in range(NUM_SMALL)]
    for key in order:
        node.put(key, SMALL)
    random.Random(seed).shuffle(order)
    for key in order:
        node.state.chunks.touch([node.found(key)])
    node.check()
    return order


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space, "STEP_RESIDENTS", 4)
    monkeypatch.setattr(space, "STEP_BYTES", 512)


# --- who goes


def test_exactly_the_oldest_go_and_readers_find_what_was_moved() -> None:
    node = Node()
    order = scattered(node)
    node.put("large", CAPACITY // 4)
    gone = order[: NUM_SMALL // 4]
    assert node.names() == {"large", *order[len(gone) :]}
    assert node.state.chunks.counters.evicted_bytes == CAPACITY // 4
    assert node.state.chunks.space.num_moved > 0
    node.check()
    for key in order[len(gone) :]:
        entry = node.index.find(key, 0.0)
        assert entry is not None
        assert (entry.version, entry.offset) == (node.found(key).version, node.found(key).offset)


def test_pins_stand_with_every_size() -> None:
    node = Node()
    order = scattered(node)
    hard, soft = order[:20], order[20:40]
    for pin, keys in ((Pin.HARD, hard), (Pin.SOFT, soft)):
        for key in keys:
            node.state.chunks.remove(ChunkKey(key))
            node.put(key, SMALL, pin)
    for number, share in enumerate((8, 4, 2)):
        node.put(f"large{number}", CAPACITY // share)
        assert node.names() >= {*hard, *soft}
        node.check()
    node.put("huge", CAPACITY - 20 * SMALL)
    assert node.names() == {"huge", *hard}, "soft pins went when nothing else was left; hard ones were moved"
    node.check()


@pytest.mark.parametrize("size", [SMALL, 3 * SMALL, CAPACITY // 16, CAPACITY // 8])
def test_a_tenant_keeps_its_share_whatever_the_others_put(size: int) -> None:
    """a and b have equal shares; a holds a quarter of the memory and keeps all of it when b puts values of any size."""
    tenants = {"a": Tenant("a"), "b": Tenant("b")}
    node = Node(TenantUsage(lambda: tenants, CAPACITY))
    scattered(node, lambda i: f"@{'ab'[bool(i % 4)]}/{i}")
    mine = {key for key in node.names() if key.startswith("@a/")}
    assert len(mine) == NUM_SMALL // 4
    for number in range(2 * CAPACITY // size):
        node.put(f"@b/large{number}", size)
        assert node.names() >= mine
    node.check()
    node.put("@a/more", CAPACITY // 8)
    assert node.names() >= mine
    node.check()


def test_a_quota_is_kept_in_steps() -> None:
    tenants = {"a": Tenant("a", CAPACITY // 2), "b": Tenant("b")}
    usage = TenantUsage(lambda: tenants, CAPACITY)
    node = Node(usage)
    scattered(node, lambda i: f"@{'ab'[i % 2]}/{i}")
    node.put("@a/large", CAPACITY // 4)
    assert sum(key.startswith("@b/") for key in node.names()) == NUM_SMALL // 2
    assert sum(key.startswith("@a/") for key in node.names()) == NUM_SMALL // 4 + 1
    node.check()


# --- what stays where it is


def test_what_is_leased_is_neither_moved_nor_evicted() -> None:
    node = Node()
    order = scattered(node)
    held = [node.found(key) for key in order[::32]]
    places = [chunk.offset for chunk in held]
    for number, chunk in enumerate(held):
        node.state.leases.pin(chunk, MAPS if number % 2 else COPIES)
    outcome = finished(node.state, reserve_or_wait(node.state, node.new("large", CAPACITY // 16), None))
    while not isinstance(outcome, Reserved):  # perhaps no window is without a lease
        lease_id, _ = node.state.leases.leases()[0]
        node.state.leases.unpin([lease_id], {1, 2})
        for _, late in node.state.admit_waiters():
            assert isinstance(late, Reserved)
            outcome = late
        if not isinstance(outcome, Reserved):
            outcome = finished(node.state, outcome)
    node.fill(outcome)
    node.check()
    assert [chunk.offset for chunk in held] == places
    assert all(chunk.is_live for chunk in held)


def test_nothing_goes_in_vain_while_leases_cut_every_window_short(small_steps: None) -> None:
    node = Node()
    order = scattered(node)
    for number in range(0, NUM_SMALL, 8):
        node.state.leases.pin(node.found(f"k{number}"), COPIES)
    waiter = finished(node.state, reserve_or_wait(node.state, node.new("large", CAPACITY // 4), None))
    assert isinstance(waiter, Waiter)
    assert node.names() >= set(order[space.STEP_RESIDENTS :]), "no more than a step's"
    left = node.names()
    for _ in range(3):
        node.state.expire(node.clock.now_s())
        assert node.state.admit_waiters() == []
        assert not node.state.has_more_to_do
    assert node.names() == left
    node.check()
    node.state.leases.unpin([lease_id for lease_id, _ in node.state.leases.leases()], {1})
    served: list[Waiter] = []
    while not served:
        served = [each for each, _ in node.state.admit_waiters()]
        assert served or node.state.has_more_to_do
    assert served == [waiter]
    node.check()


def test_who_begins_to_read_between_two_steps_is_spared(small_steps: None) -> None:
    node = Node()
    order = scattered(node)
    outcome = reserve_or_wait(node.state, node.new("large", CAPACITY // 8), None)
    pinned: dict[str, int] = {}
    rng = random.Random(5)
    while isinstance(outcome, Waiter):
        assert node.state.has_more_to_do
        start, end = node.state.chunks.space.allocator.fence
        inside = [key for key in order if (c := node.state.chunks.find(ChunkKey(key))) and start <= c.offset < end]
        if inside and len(pinned) < 3:
            key = rng.choice(inside)
            pinned[key] = node.found(key).offset
            node.state.leases.pin(node.found(key), MAPS)
        for _, late in node.state.admit_waiters():
            assert isinstance(late, Reserved)
            outcome = late
        node.check()
    assert isinstance(outcome, Reserved)
    node.fill(outcome)
    node.check()
    assert len(pinned) == 3
    assert node.state.chunks.space.num_moved > 0
    assert {key: node.found(key).offset for key in pinned} == pinned


def test_a_large_chunk_that_is_removed_while_it_is_copied_leaves_nothing(small_steps: None) -> None:
    node = Node()
    for i in range(8):
        node.put(f"k{i}", CAPACITY // 8)
    node.state.chunks.remove(ChunkKey("k1"))
    node.state.chunks.remove(ChunkKey("k5"))
    outcome = reserve_or_wait(node.state, node.new("large", CAPACITY // 4), None)
    assert isinstance(outcome, Waiter)
    while not node.state.chunks.space.in_between:
        node.state.admit_waiters()
    fence = node.state.chunks.space.allocator.fence
    (moving,) = (c for c in node.state.chunks.table if fence[0] <= c.offset < fence[1])
    node.state.chunks.remove(moving.key)
    outcome = finished(node.state, outcome)
    assert isinstance(outcome, Reserved)
    node.fill(outcome)
    node.check()
    assert moving.key not in node.names()
    assert node.state.chunks.counters.evictions == 0


def test_who_gives_up_leaves_no_fence(small_steps: None) -> None:
    node = Node()
    scattered(node)
    waiter = reserve_or_wait(node.state, node.new("large", CAPACITY // 4), None)
    assert isinstance(waiter, Waiter)
    while node.state.chunks.space.allocator.fence == (0, 0):
        node.state.admit_waiters()
    assert isinstance(node.state.give_up_waiting(waiter), StoreFull)
    assert node.state.chunks.space.allocator.fence == (0, 0)
    assert not node.state.has_more_to_do
    node.check()
    node.put("next", SMALL)
    node.check()


# --- waiting


def test_a_put_that_found_no_room_is_tried_when_there_is_reason_to() -> None:
    queue = WaitQueue()
    assert not queue.is_due
    waiter = Waiter(new("large", 1600), None)
    queue.join(waiter)
    assert queue.is_due
    queue.tried_in_vain()
    queue.tick()
    assert not queue.is_due, "nothing came free"
    queue.freed(99)
    assert not queue.is_due
    queue.freed(1)
    assert queue.is_due, "a sixteenth"
    queue.tried_in_vain()
    queue.freed(1)
    queue.tick()
    assert queue.is_due, "a tick takes whatever there is"
    queue.tried_in_vain()
    queue.recheck()
    assert queue.is_due
    queue.tried_in_vain()
    queue.join(Waiter(new("next"), None))
    queue.leave(waiter)
    assert queue.is_due, "the next one was not tried yet"


# --- any life


@pytest.mark.parametrize("seed", range(12))
def test_a_seeded_life(seed: int, small_steps: None) -> None:
    """Values of 1 B to a quarter of the memory, pins, leases, removals, ends by time; in small steps."""
    rng = random.Random(seed)
    tenants = {"a": Tenant("a", CAPACITY // 2), "b": Tenant("b")} if seed % 2 else {}
    node = Node(TenantUsage(lambda: tenants, CAPACITY) if tenants else None)
    state = node.state
    reserved: list[Reserved] = []
    waiting: list[Waiter] = []
    leases: list[int] = []

    def took(outcome: Outcome | TanghuluError) -> None:
        if isinstance(outcome, Waiter):
            waiting.append(outcome)
        elif isinstance(outcome, Reserved):
            reserved.append(outcome)
        else:
            assert isinstance(outcome, Existed | StoreFull | Overloaded), outcome

    for _ in range(800):
        roll = rng.random()
        key = f"{rng.choice(['@a/', '@b/'])}{rng.randrange(600)}"
        if roll < 0.45:
            size = int(2 ** rng.uniform(0, 14 if rng.random() < 0.2 else 10))
            pin = rng.choices(list(Pin), [8, 2, 1])[0]
            ttl_s = rng.choice([None, None, rng.uniform(0.1, 3)])
            try:
                took(reserve_or_wait(state, node.new(key, size, pin, ttl_s), rng.choice([None, COPIES])))
            except (StoreFull, Overloaded) as error:
                took(error)
        elif reserved and (roll < 0.65 or len(reserved) > 3):
            each = reserved.pop(rng.randrange(len(reserved)))
            if each.lease_id and state.leases.lease(each.lease_id) is None:
                continue  # it ended by time
            node.fill(each)
        elif roll < 0.75:
            chunk = state.chunks.look_up(ChunkKey(key))
            if chunk is not None:
                state.chunks.touch([chunk])
                leases.append(state.leases.pin(chunk, rng.choice([COPIES, MAPS])).lease_id)
        elif leases and (roll < 0.85 or len(leases) > 5):
            state.leases.unpin([leases.pop(rng.randrange(len(leases)))], {1, 2})
        elif roll < 0.9:
            state.chunks.remove(ChunkKey(key))
        elif roll < 0.95 and waiting:
            state.give_up_waiting(waiting.pop(rng.randrange(len(waiting))))
        else:
            node.clock.advance(rng.uniform(0, 0.3))
            state.expire(node.clock.now_s())
        for waiter, outcome in state.admit_waiters():
            waiting.remove(waiter)
            took(outcome)
        state.chunks.end_call()
        state.reports.leader.take()
        state.reports.leader.done()
        node.check()
    assert state.chunks.space.num_moved > 0
