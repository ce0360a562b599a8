"""Any sequence of calls to a node in virtual time; ``check()`` after every step."""

from __future__ import annotations

import contextlib

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from tanghulu.errors import LeaseExpired, Overloaded, StoreFull, TanghuluError
from tanghulu.store.node.state.outcomes import Reserved
from tanghulu.store.protocol.checksums import NO_CHECKSUMS
from tanghulu.store.protocol.types import Pin
from tanghulu.types import ChunkKey, LeaseId
from tests.store.node.rig import CAPACITY, COPIES, MAPS, commit, make_state, new, reserve_or_wait
from tests.virtual.clock import ManualClock

# --- any sequence


class AnyNode(RuleBasedStateMachine):
    """Puts, pins, removals, exits and time in any order: the books always balance and no lease's range is reused."""

    reservations: Bundle[LeaseId] = Bundle("reservations")
    pins: Bundle[LeaseId] = Bundle("pins")

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.state = make_state(self.clock, CAPACITY // 2)

    @rule(
        target=reservations,
        key=st.sampled_from("abcdefgh"),
        size=st.integers(1, CAPACITY // 2),
        maps=st.booleans(),
        pin=st.sampled_from(Pin),
        ttl_s=st.none() | st.floats(0.1, 5),
    )
    def reserve(self, key: str, size: int, maps: bool, pin: Pin, ttl_s: float | None) -> LeaseId:
        try:
            outcome = reserve_or_wait(self.state, new(key, size, pin=pin, ttl_s=ttl_s), MAPS if maps else COPIES)
        except (StoreFull, Overloaded):
            return LeaseId(0)
        return outcome.lease_id if isinstance(outcome, Reserved) else LeaseId(0)

    @rule(lease=consumes(reservations), session=st.sampled_from([1, 2]), visible=st.booleans())
    def commit(self, lease: LeaseId, session: int, visible: bool) -> None:
        with contextlib.suppress(LeaseExpired):
            commit(self.state, lease, session, NO_CHECKSUMS, visible=visible)

    @rule(answers=st.lists(st.booleans(), min_size=8, max_size=8), fails=st.booleans())
    def announce(self, answers: list[bool], fails: bool) -> None:
        message = self.state.reports.leader.take()
        if fails:
            self.state.reports.leader.requeue()
            return
        for chunk, accepted in zip(message.added, answers, strict=False):
            self.state.reported(chunk, accepted=accepted)
        self.state.reports.leader.done()

    @rule(key=st.sampled_from("abcdefgh"))
    def give_up(self, key: str) -> None:
        chunk = self.state.chunks.table.find(ChunkKey(key))
        if chunk is not None:
            self.state.gave_up(chunk)

    @rule(target=pins, key=st.sampled_from("abcdefgh"), maps=st.booleans())
    def pin(self, key: str, maps: bool) -> LeaseId:
        chunk = self.state.chunks.look_up(ChunkKey(key))
        if chunk is None:
            return LeaseId(0)
        self.state.chunks.touch([chunk])
        return self.state.leases.pin(chunk, MAPS if maps else COPIES).lease_id

    @rule(lease=consumes(pins))
    def unpin(self, lease: LeaseId) -> None:
        self.state.leases.unpin([lease], {1, 2})

    @rule(key=st.sampled_from("abcdefgh"))
    def remove(self, key: str) -> None:
        self.state.chunks.remove(ChunkKey(key))

    @rule(seconds=st.floats(0, 2))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.state.expire(self.clock.now_s())

    @rule(session=st.sampled_from([1, 2]), exits=st.booleans())
    def lose_session(self, session: int, exits: bool) -> None:
        self.state.close_session(session)
        self.state.session_exited(session)
        self.state.leases.access.open_session(session, 4242 if session == 2 else None)

    @rule()
    def admit(self) -> None:
        for _, outcome in self.state.admit_waiters():
            assert not isinstance(outcome, TanghuluError) or isinstance(outcome, Overloaded | StoreFull)

    @invariant()
    def books_balance(self) -> None:
        self.state.check()
        for lease_id, chunk in self.state.leases.leases():
            lease = self.state.leases.lease(lease_id)
            assert lease is not None
            assert lease.offset == chunk.offset


TestAnyNode = AnyNode.TestCase
TestAnyNode.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
