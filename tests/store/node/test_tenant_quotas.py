"""Quotas and fair eviction, without processes: the order, the book, and both in a node's decisions."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tanghulu.auth.tenants import Tenant
from tanghulu.errors import InvalidRequest, QuotaExceeded, StoreFull
from tanghulu.eviction import POLICIES, Policy, make_policy
from tanghulu.eviction.fair import Fair
from tanghulu.store.master.core import TenantTotals
from tanghulu.store.node.rpc.metrics import MAX_LABELS, NONE, OTHERS, labelled
from tanghulu.store.node.space.space import STEP_RESIDENTS
from tanghulu.store.node.state.node_chunks import QUOTA_LOOK
from tanghulu.store.node.state.node_state import NodeState
from tanghulu.store.node.state.outcomes import Reserved, Waiter
from tanghulu.store.node.state.tenant_usage import Policies, TenantUsage
from tanghulu.store.protocol.messages import TenantFigures
from tanghulu.store.protocol.types import Pin
from tanghulu.types import ChunkKey
from tests.store.node.rig import CAPACITY, COPIES, make_state, new, put, reserve_or_wait

WEIGHTS = {"a": 60.0, "b": 40.0, "": 10.0}
SIZE = 64


def fair(name: str = "lru") -> Fair:
    return Fair(lambda: make_policy(name), lambda tenant: WEIGHTS[tenant])


def k(tenant: str, name: str) -> ChunkKey:
    return ChunkKey(f"@{tenant}/{name}" if tenant else name)


def test_the_example_of_the_module() -> None:
    policy = fair()
    for key, size in ((k("a", "1"), 20), (k("b", "1"), 10), (k("a", "2"), 30), (k("b", "2"), 40)):
        policy.add(key, size)
    assert list(policy.victims()) == [k("b", "1"), k("b", "2"), k("a", "1"), k("a", "2")]
    assert list(policy.victims_of("a")) == [k("a", "1"), k("a", "2")]
    assert list(policy.victims_of("nobody")) == []
    policy.check()


def test_a_flood_evicts_itself() -> None:
    """Taking the first victim whenever more than 100 bytes are there, b keeps its 40 whatever a puts."""
    policy = fair()
    for number in range(4):
        policy.add(k("b", str(number)), 10)
    for number in range(50):
        policy.add(k("a", str(number)), 10)
        if len(policy) > 10:
            policy.remove(next(policy.victims()), evicted=True)
    held = list(policy.victims())
    assert sum(key.startswith("@b/") for key in held) == 4
    assert set(held) >= {k("a", str(number)) for number in range(45, 50)}


OPS = st.tuples(st.sampled_from(["add", "touch", "remove", "evict", "batch"]), st.sampled_from("ab"), st.integers(0, 5))


@pytest.mark.parametrize("name", sorted(POLICIES))
@settings(max_examples=30, deadline=None)
@given(steps=st.lists(OPS, max_size=40))
def test_any_sequence_keeps_the_contract(name: str, steps: list[tuple[str, str, int]]) -> None:
    policy: Policy = fair(name)
    known: dict[ChunkKey, None] = {}
    for step, tenant, number in steps:
        key = k(tenant, str(number))
        if step == "batch":
            policy.begin_batch()
        elif step == "touch":
            policy.touch(key)
        elif step == "add" and key not in known:
            policy.add(key, number + 1)
            known[key] = None
        elif step in ("remove", "evict") and key in known:
            policy.remove(key, evicted=step == "evict")
            del known[key]
        victims = list(policy.victims())
        assert sorted(victims) == sorted(known)
        assert victims == list(policy.victims())
        assert len(policy) == len(known)
        policy.check()


def make_node(capacity_bytes: int = CAPACITY, **quotas: int) -> tuple[NodeState, TenantUsage]:
    tenants = {name: Tenant(name, quota) for name, quota in quotas.items()}
    book = TenantUsage(lambda: tenants, capacity_bytes)
    state = make_state(tenants=book, capacity_bytes=capacity_bytes)
    state.chunks.space.switch_policy(lambda: Policies.fair(book).memory("lru"))
    return state, book


def held(state: NodeState, tenant: str) -> int:
    return sum(chunk.key.startswith(f"@{tenant}/") for chunk in state.chunks.table)


def usage(book: TenantUsage, tenant: str) -> TenantFigures:
    (found,) = (each for each in book.usage() if each.tenant == tenant)
    return found


def test_a_put_beyond_the_quota_evicts_the_tenants_own() -> None:
    state, book = make_node(a=4 * SIZE, b=0)
    put(state, new("@b/first"))
    for number in range(10):
        put(state, new(f"@a/{number}"))
        state.check()
        assert usage(book, "a").used_bytes <= 4 * SIZE
    assert held(state, "a") == 4
    assert held(state, "b") == 1
    assert state.chunks.find(ChunkKey("@a/9")) is not None
    assert (usage(book, "a").evictions, usage(book, "b").evictions) == (6, 0)
    assert usage(book, "a").evicted_bytes == 6 * SIZE
    state.chunks.look_up(ChunkKey("@a/9"))
    state.chunks.look_up(ChunkKey("@a/0"))
    assert (usage(book, "a").hits, usage(book, "a").hit_bytes, usage(book, "a").misses) == (1, SIZE, 1)
    with pytest.raises(InvalidRequest, match="more than tenant 'a' may hold"):
        reserve_or_wait(state, new("@a/large", 5 * SIZE), None)


def test_many_small_chunks_give_way_in_steps_that_look_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the tenant holds, a step looks at few of its chunks: a large put may replace a hundred thousand."""
    quota = 2000 * SIZE
    state, book = make_node(4 * quota, a=quota)
    for number in range(2000):
        put(state, new(f"@a/{number}"))
    looked = list[ChunkKey]()
    find = state.chunks.table.find
    monkeypatch.setattr(state.chunks.table, "find", lambda key: looked.append(key) or find(key))
    waiter, steps = reserve_or_wait(state, new("@a/large", 1500 * SIZE), None), 0
    assert isinstance(waiter, Waiter)
    while state.has_more_to_do:
        before, evicted = len(looked), usage(book, "a").evictions
        steps, served = steps + 1, state.admit_waiters()
        assert len(looked) - before <= QUOTA_LOOK + 1
        assert usage(book, "a").evictions - evicted <= STEP_RESIDENTS
    assert [isinstance(outcome, Reserved) for _, outcome in served] == [True]
    assert steps >= 1500 // STEP_RESIDENTS
    assert usage(book, "a").used_bytes == quota
    state.check()


def test_a_quota_for_all_nodes_is_kept_in_parts() -> None:
    """The example of the module, by 9 chunks on three nodes of which this is A, then B."""
    total = 9 * SIZE
    state, book = make_node()
    book._tenants = lambda: {"a": Tenant("a", cluster_quota_bytes=total), "free": Tenant("free")}
    for number in range(12):
        put(state, new(f"@a/{number}"))
    assert held(state, "a") == 9, "nothing is known of others"
    assert book.bounded() == [("a", total)]
    put(state, new("@free/1"))
    book.update_elsewhere({"a": 2 * SIZE}, 3)
    assert book.overdrawn() == [("a", 2 * SIZE)]
    state.chunks.trim_tenants()
    state.check()
    assert (held(state, "a"), held(state, "free")) == (7, 1)
    assert state.chunks.find(ChunkKey("@a/11")) is not None
    assert book.overdrawn() == []
    book.update_elsewhere({"a": 100 * SIZE}, 3)  # B: others hold everything, and it has a third of it nevertheless
    state.chunks.trim_tenants()
    assert held(state, "a") == 3
    put(state, new("@a/more"))
    assert held(state, "a") == 3
    with pytest.raises(InvalidRequest, match="on all nodes"):
        reserve_or_wait(state, new("@a/large", total + 1), None)
    with pytest.raises(QuotaExceeded, match="may hold"):
        reserve_or_wait(state, new("@a/third", 4 * SIZE), None)


def test_the_master_adds_up_what_nodes_say() -> None:
    totals = TenantTotals()
    totals.update("n1", {"a": 5, "b": 1})
    totals.update("n2", {"a": 7})
    totals.update("n3", {"a": 1, "b": 2})
    assert totals.elsewhere("n1", {"n1", "n2", "n3"}) == {"a": 8, "b": 2}
    assert totals.elsewhere("n1", {"n1", "n3"}) == {"a": 1, "b": 2}
    totals.update("n3", {"a": 0})
    assert totals.elsewhere("n1", {"n1", "n3"}) == {"a": 0, "b": 0}


def test_what_is_leased_counts_and_is_not_evicted() -> None:
    state, book = make_node(a=2 * SIZE)
    put(state, new("@a/1"))
    chunk = state.chunks.find(ChunkKey("@a/1"))
    assert chunk is not None
    pinned = state.leases.pin(chunk, COPIES)
    put(state, new("@a/2", pin=Pin.SOFT))
    put(state, new("@a/3"))
    assert sorted(state.chunks.table.keys()) == ["@a/1", "@a/3"]
    state.chunks.remove(ChunkKey("@a/1"))
    assert usage(book, "a").used_bytes == 2 * SIZE, "somebody still reads it"
    state.leases.unpin([pinned.lease_id], [COPIES.session_id])
    assert usage(book, "a").used_bytes == SIZE
    reserved = [reserve_or_wait(state, new(f"@a/r{number}"), COPIES) for number in range(2)]
    with pytest.raises(QuotaExceeded, match="tenant 'a' may hold"):
        reserve_or_wait(state, new("@a/more"), COPIES)
    assert len(reserved) == 2
    state.check()


def test_a_full_node_evicts_from_who_holds_most_for_its_share() -> None:
    """a and b have no quotas, so equal shares; a came first and holds everything, b gets its half of it."""
    state, book = make_node(a=0, b=0)
    num_slots = CAPACITY // SIZE
    for number in range(2 * num_slots):
        put(state, new(f"@a/{number}"))
    assert held(state, "a") == num_slots
    for number in range(2 * num_slots):
        put(state, new(f"@b/{number}"))
        state.check()
    assert abs(held(state, "a") - num_slots // 2) <= 1
    for number in range(2 * num_slots):
        put(state, new(f"@a/again-{number}"))
    assert abs(held(state, "b") - num_slots // 2) <= 1
    assert usage(book, "b").evictions > 0


def test_each_tenant_has_its_share_of_what_may_be_pinned_hard() -> None:
    """A quarter of the memory, 16 chunks: a and b have quotas of 3 to 1, so 12 and 4 of them."""
    state, book = make_node(a=48 * SIZE, b=16 * SIZE)
    for number in range(12):
        put(state, new(f"@a/{number}", pin=Pin.HARD))
    with pytest.raises(StoreFull, match=r"hard pins of tenant 'a' hold 768 B of at most 768 B .* share of 1\.0 KiB"):
        put(state, new("@a/more", pin=Pin.HARD))
    put(state, new("@a/more", pin=Pin.SOFT))
    for number in range(4):
        put(state, new(f"@b/{number}", pin=Pin.HARD))
    state.check()
    with pytest.raises(StoreFull, match="tenant 'b'"):
        put(state, new("@b/more", pin=Pin.HARD))
    state.chunks.remove(ChunkKey("@a/0"))
    put(state, new("operators", pin=Pin.HARD))
    with pytest.raises(StoreFull, match=r"hard pins of all tenants take the 1\.0 KiB that they may"):
        put(state, new("@a/again", pin=Pin.HARD))
    with pytest.raises(StoreFull, match=r"hard pins hold 1\.0 KiB of at most 1\.0 KiB"):
        put(state, new("operators-again", pin=Pin.HARD))
    state.chunks.remove(ChunkKey("operators"))
    put(state, new("@a/again", pin=Pin.HARD))
    assert (book.hard_pinned_bytes("a"), book.hard_pinned_bytes("b")) == (12 * SIZE, 4 * SIZE)
    assert book.share_of("gone", 1000) == 0
    state.check()


def test_hits_and_misses_are_counted_for_known_tenants() -> None:
    state, book = make_node(a=0)
    put(state, new("@a/1"))
    for key in ("@a/1", "@a/2", "@guess/1", "plain"):
        state.chunks.look_up(ChunkKey(key))
    assert (usage(book, "a").hits, usage(book, "a").misses) == (1, 1)
    assert [each.tenant for each in book.usage()] == ["", "a"]


def test_labels_are_bounded() -> None:
    rows = labelled([TenantFigures(f"t{i}", used_bytes=i, hits=1) for i in range(MAX_LABELS + 5)] + [TenantFigures("")])
    assert len(rows) == MAX_LABELS + 1
    assert rows[OTHERS].hits == 5
    assert rows[OTHERS].used_bytes == 0 + 1 + 2 + 3 + 4
    assert set(labelled([TenantFigures("")])) == {NONE}
