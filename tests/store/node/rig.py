"""A small node's decisions for tests: its size, its clients, and short ways to put."""

from __future__ import annotations

from tanghulu.errors import TanghuluError
from tanghulu.eviction import make_policy
from tanghulu.store.node.state.node_state import NodeState, make_node_state
from tanghulu.store.node.state.outcomes import CommittedBy, Existed, Holder, Reserved, Waiter
from tanghulu.store.node.state.tenant_usage import TenantUsage
from tanghulu.store.protocol.checksums import Checksums
from tanghulu.store.protocol.types import NewChunk, Pin
from tanghulu.transfer_engine.core.access import AccessTable
from tanghulu.types import ChunkKey, LeaseId
from tests.virtual.clock import ManualClock

CAPACITY = 64 * 64
LEASE_MS = 1000
GENERATION = 9
COPIES, MAPS = Holder(1, False), Holder(2, True)
SUM = Checksums(0, (1,))


def make_state(
    clock: ManualClock | None = None,
    mapped_bytes: int = CAPACITY,
    tenants: TenantUsage | None = None,
    capacity_bytes: int = CAPACITY,
) -> NodeState:
    clock = clock or ManualClock()
    access = AccessTable(clock, LEASE_MS, mapped_bytes)
    access.open_session(1, None)
    access.open_session(2, 4242)
    return make_node_state(
        capacity_bytes, access, lambda: make_policy("lru"), clock, generation=GENERATION, tenants=tenants
    )


def new(key: str, size: int = 64, version: int = 1, pin: Pin = Pin.NONE, ttl_s: float | None = None) -> NewChunk:
    return NewChunk(ChunkKey(key), version, size, SUM, pin, ttl_s)


Outcome = Reserved | Existed | Waiter


def reserve_or_wait(state: NodeState, new: NewChunk, holder: Holder | None) -> Outcome:
    return state.reserve(new, holder) or state.wait_for_room(new, holder)


def put(state: NodeState, item: NewChunk) -> Reserved | Existed:
    outcome = finished(state, reserve_or_wait(state, item, None))
    assert not isinstance(outcome, Waiter), "no room"
    if isinstance(outcome, Existed):
        return outcome
    return state.commit(outcome.chunk, item.checksums, CommittedBy.NODE_UNAWAITED)


def finished(state: NodeState, outcome: Outcome) -> Outcome:
    """The outcome when room has been made as far as can be, which takes several steps; alone in the queue."""
    served: list[tuple[Waiter, Reserved | Existed | TanghuluError]] = []
    while state.has_more_to_do and not served:
        state.check()
        served = state.admit_waiters()
    for waiter, late in served:
        assert waiter is outcome
        assert not isinstance(late, TanghuluError)
        return late
    return outcome


def commit(
    state: NodeState, lease_id: LeaseId, session_id: int, sums: Checksums, *, visible: bool
) -> Reserved | Existed:
    return state.commit(state.leases.end_writing(lease_id, session_id), sums, CommittedBy.node(visible=visible))


def keys(state: NodeState) -> list[str]:
    return sorted(state.chunks.table.keys())
