"""The access table: what frees a range and what does not, in virtual time, and against a model."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from tanghulu.errors import InvalidRequest, LeaseExpired, Overloaded
from tanghulu.runtime.clock import LEAST_BYTES_S
from tanghulu.transfer_engine.core import access
from tanghulu.transfer_engine.core.access import TRANSITIONS, AccessTable, Freed, Lease, LeaseEvent, LeaseState, Opcode
from tests.virtual.clock import ManualClock

READ, WRITE = Opcode.READ, Opcode.WRITE
LOCAL, REMOTE = 1, 2
#: The least rate in the model, for ranges of some bytes.
MODEL_BYTES_S = 10


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


@pytest.fixture
def table(clock: ManualClock) -> AccessTable:
    table = AccessTable(clock, lease_ms=1000, max_quarantined_bytes_per_session=100)
    table.open_session(LOCAL, 1234)
    table.open_session(REMOTE, None)
    return table


def test_a_released_lease_is_free_at_once(table: AccessTable):
    lease = table.grant(REMOTE, 10, 20, READ)
    assert table.busy(29, 1)
    assert not table.busy(30, 100)
    assert not table.busy(0, 10)
    assert table.release(lease) == [Freed(lease, 10, 20)]
    assert not table.busy(0, 100)
    assert table.release(lease) == []


def test_time_frees_what_a_remote_peer_holds(table: AccessTable, clock: ManualClock):
    lease = table.grant(REMOTE, 10, 20, READ)
    clock.advance(0.999)
    assert table.expire(clock.now_s()) == []
    assert table.is_active(lease)
    clock.advance(0.001)
    assert not table.is_active(lease)
    assert table.expire(clock.now_s()) == [Freed(lease, 10, 20)]


@pytest.mark.parametrize("exited", [False, True])
def test_the_leases_of_an_ended_session_end_some_at_a_time(
    table: AccessTable, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, exited: bool
):
    monkeypatch.setattr(access, "MAX_ENDED", 4)
    leases = [
        table.grant(LOCAL if number % 3 else REMOTE, number, 1, READ, shm=number % 3 == 1) for number in range(30)
    ]
    mapped = {lease for number, lease in enumerate(leases) if number % 3 == 1}
    freed = table.session_exited(LOCAL) if exited else table.close_session(LOCAL)
    for lease in leases[1:3]:
        with pytest.raises(LeaseExpired):
            table.begin(LOCAL, lease, READ, table.lease(lease).offset if table.lease(lease) else 0, 1)
    freed += table.release(leases[2])
    for _ in range(10):
        table.check()
        more = table.expire(clock.now_s())
        assert len(more) <= 4
        freed += more
    expected = {lease for number, lease in enumerate(leases) if number % 3}
    assert {each.lease_id for each in freed} == (expected if exited else expected - mapped)
    assert len(freed) == len({each.lease_id for each in freed})
    assert table.has_session(LOCAL) == (not exited)
    clock.advance(1.0)
    ends = [len(table.expire(clock.now_s())) for _ in range(4)]
    assert ends == [4, 4, 2, 0]
    freed = table.session_exited(LOCAL)
    while more := table.expire(clock.now_s()):
        freed += more
    assert {each.lease_id for each in freed} == (set() if exited else mapped)
    assert table.num_leases == 0
    table.check()


def test_begin_refuses_after_the_end_even_before_expire_was_called(table: AccessTable, clock: ManualClock):
    lease = table.grant(REMOTE, 0, 10, READ)
    clock.advance(1.0)
    with pytest.raises(LeaseExpired):
        table.begin(REMOTE, lease, READ, 0, 10)


def test_an_open_transfer_holds_an_ended_lease(table: AccessTable, clock: ManualClock):
    leases = [table.grant(REMOTE, at, 10, READ) for at in (0, 10, 20)]
    for lease, at in zip(leases, (0, 10, 20), strict=True):
        table.begin(REMOTE, lease, READ, at, 5)
        table.begin(REMOTE, lease, READ, at + 5, 5)
    assert table.release(leases[0]) == []
    clock.advance(1.0)
    assert table.expire(clock.now_s()) == []
    assert table.close_session(REMOTE) == []
    table.check()
    for lease, at in zip(leases, (0, 10, 20), strict=True):
        with pytest.raises(LeaseExpired):
            table.begin(REMOTE, lease, READ, at, 5)
        assert table.end(lease) == []
        assert table.busy(at, 1)
        assert table.end(lease) == [Freed(lease, at, 10)]
    assert not table.has_session(REMOTE)


@pytest.mark.parametrize("lost_by", ["time", "connection"])
@pytest.mark.parametrize("freed_by", ["release", "exit"])
def test_mapped_ranges_are_quarantined(table: AccessTable, clock: ManualClock, lost_by: str, freed_by: str):
    lease = table.grant(LOCAL, 0, 60, READ, shm=True)
    if lost_by == "time":
        clock.advance(5)
        assert table.expire(clock.now_s()) == []
    else:
        assert table.close_session(LOCAL) == []
    clock.advance(1e6)
    assert table.expire(clock.now_s()) == []
    assert table.quarantined_bytes == 60
    assert table.busy(59, 1)
    with pytest.raises(LeaseExpired):
        table.begin(LOCAL, lease, READ, 0, 10)
    freed = table.release(lease) if freed_by == "release" else table.session_exited(LOCAL)
    assert freed == [Freed(lease, 0, 60)]
    assert table.quarantined_bytes == 0
    assert table.has_session(LOCAL) == (lost_by == "time" and freed_by == "release")
    table.check()


def test_the_cap_counts_what_could_come_into_quarantine(table: AccessTable):
    first = table.grant(LOCAL, 0, 60, READ, shm=True)
    with pytest.raises(Overloaded, match="give it copies"):
        table.grant(LOCAL, 60, 60, READ, shm=True)
    table.grant(LOCAL, 60, 60, READ)
    table.grant(LOCAL, 200, 40, READ, shm=True)
    table.release(first)
    table.grant(LOCAL, 0, 60, READ, shm=True)


def test_renewing_lengthens_and_never_shortens(table: AccessTable, clock: ManualClock):
    lease = table.grant(REMOTE, 0, 100 * LEAST_BYTES_S, READ)
    clock.advance(0.5)
    table.begin(REMOTE, lease, READ, 0, 10)
    table.end(lease, moved=True)
    clock.advance(0.6)
    assert table.expire(clock.now_s()) == []
    clock.advance(0.4)
    assert [each.lease_id for each in table.expire(clock.now_s())] == [lease]


def test_a_lease_lasts_while_bytes_flow_under_it_up_to_its_hard_end(table: AccessTable, clock: ManualClock):
    """2 s of bytes at the least rate, so 3 s in all."""
    lease = table.grant(REMOTE, 0, 2 * LEAST_BYTES_S, READ)
    for _ in range(2):  # open all the time, and another slice may begin
        table.begin(REMOTE, lease, READ, 0, 10)
        clock.advance(1.0)
        assert table.is_active(lease)
        assert table.expire(clock.now_s()) == []
        table.begin(REMOTE, lease, READ, 10, 10)
        assert table.end(lease) == []
    assert table.end(lease, moved=True) == []
    clock.advance(0.9)
    assert table.expire(clock.now_s()) == []
    assert table.is_active(lease), "a slice was moved whole just now"
    table.begin(REMOTE, lease, READ, 0, 10)
    clock.advance(0.1)
    assert table.expire(clock.now_s()) == []
    with pytest.raises(LeaseExpired):
        table.begin(REMOTE, lease, READ, 0, 10)
    table.check()
    assert table.end(lease, moved=True) == []
    assert table.end(lease, moved=True) == [Freed(lease, 0, 2 * LEAST_BYTES_S)]


def test_a_slice_that_was_not_moved_renews_nothing(table: AccessTable, clock: ManualClock):
    lease = table.grant(REMOTE, 0, 100 * LEAST_BYTES_S, READ)
    clock.advance(0.9)
    table.begin(REMOTE, lease, READ, 0, 10)
    table.end(lease)
    clock.advance(0.1)
    assert [each.lease_id for each in table.expire(clock.now_s())] == [lease]


def test_what_all_sessions_could_bring_into_quarantine_is_capped(clock: ManualClock):
    table = AccessTable(clock, 1000, 100, max_quarantined_bytes=150)
    for session_id in (1, 2):
        table.open_session(session_id, 1234)
    table.grant(1, 0, 100, READ, shm=True)
    lease = table.grant(2, 100, 50, READ, shm=True)
    with pytest.raises(Overloaded, match="all sessions"):
        table.grant(2, 150, 10, READ, shm=True)
    table.grant(2, 150, 10, READ)
    table.close_session(1)
    clock.advance(10)
    table.expire(clock.now_s())
    assert table.quarantined_bytes == 150
    table.release(lease)
    table.grant(2, 100, 50, READ, shm=True)
    table.check()


def test_refusals(table: AccessTable):
    lease = table.grant(REMOTE, 100, 50, WRITE)
    for offset, length in ((99, 1), (100, 51), (149, 2), (0, 1000)):
        with pytest.raises(InvalidRequest):
            table.begin(REMOTE, lease, WRITE, offset, length)
    with pytest.raises(InvalidRequest):
        table.begin(REMOTE, lease, READ, 100, 1)
    with pytest.raises(LeaseExpired):
        table.begin(LOCAL, lease, WRITE, 100, 1)
    with pytest.raises(InvalidRequest, match="no process"):
        table.grant(REMOTE, 0, 1, READ, shm=True)
    with pytest.raises(InvalidRequest):
        table.grant(99, 0, 1, READ)
    with pytest.raises(InvalidRequest):
        table.open_session(REMOTE, None)
    assert table.close_session(99) == table.session_exited(99) == []


def test_too_many_leases(clock: ManualClock):
    table = AccessTable(clock, 1000, 0, max_leases=2)
    table.open_session(1, None)
    lease = table.grant(1, 0, 1, READ)
    table.grant(1, 0, 1, READ)
    with pytest.raises(Overloaded):
        table.grant(1, 0, 1, READ)
    table.release(lease)
    table.grant(1, 0, 1, READ)


def test_an_allocator_s_mistake_asserts(table: AccessTable):
    table.grant(REMOTE, 0, 10, READ)
    table.grant(LOCAL, 5, 10, READ)
    table.check()
    wrong = table.grant(LOCAL, 9, 2, WRITE)
    with pytest.raises(AssertionError, match="leased to somebody else"):
        table.check()
    table.release(wrong)
    table.grant(LOCAL, 15, 5, WRITE)
    table.check()
    table.grant(LOCAL, 10, 6, READ)
    with pytest.raises(AssertionError, match="leased to somebody else"):
        table.check()


def test_an_unknown_pair_asserts():
    for state in LeaseState:
        for event in LeaseEvent:
            lease = Lease(1, 1, 0, 1, READ, False, 0.0, 0.0, state)  # type: ignore[arg-type]
            if (state, event) in TRANSITIONS:
                assert lease.step(event) is TRANSITIONS[state, event]
            else:
                with pytest.raises(AssertionError):
                    lease.step(event)


def test_released_leases_do_not_pile_up(table: AccessTable):
    for _ in range(1000):
        table.release(table.grant(REMOTE, 0, 1, READ))
    assert len(table._expiries) < 200
    table.check()


class AccessMachine(RuleBasedStateMachine):
    """Random grants, transfers, losses and exits beside a naive model of who may still touch what.

    The model: a byte may be reused unless a lease on it is active; or mapped by a process that neither gave it back nor
    exited; or has a transfer open.
    """

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(access, "LEAST_BYTES_S", MODEL_BYTES_S)
        self.clock = ManualClock()
        self.table = AccessTable(self.clock, 1000, 50)
        self.sessions: dict[int, int | None] = {}
        self.model: dict[int, dict[str, object]] = {}
        self.next_session = 1

    def teardown(self) -> None:
        self.patch.undo()

    @rule(local=st.booleans())
    def open_session(self, local: bool) -> None:
        self.table.open_session(self.next_session, 1 if local else None)
        self.sessions[self.next_session] = 1 if local else None
        self.next_session += 1

    @rule(target=leases, data=st.data(), offset=st.integers(0, 60), length=st.integers(1, 30), shm=st.booleans(),
          opcode=st.sampled_from(Opcode), lease_ms=st.sampled_from([None, 10, 5000]))  # fmt: skip
    def grant(self, data, offset, length, shm, opcode, lease_ms):
        if not self.sessions:
            return 0
        session_id = data.draw(st.sampled_from(sorted(self.sessions)))
        end = offset + length
        touching = [
            each for each in self.model.values() if each["offset"] < end and offset < each["offset"] + each["length"]
        ]
        if any(opcode is WRITE or each["opcode"] is WRITE for each in touching):
            return 0
        mapped = sum(each["length"] for each in self.model.values() if each["shm"] and each["session"] == session_id)
        try:
            lease = self.table.grant(session_id, offset, length, opcode, lease_ms, shm=shm)
        except Overloaded:
            assert shm
            assert mapped + length > 50
            return 0
        except InvalidRequest:
            assert shm
            assert self.sessions[session_id] is None
            return 0
        self.model[lease] = {
            "session": session_id, "offset": offset, "length": length, "opcode": opcode, "shm": shm, "open": 0,
            "until": self.clock.now_s() + (lease_ms or 1000) / 1000, "state": "active",
            "last": self.clock.now_s() + (lease_ms or 1000) / 1000 + length / MODEL_BYTES_S,
        }  # fmt: skip
        return lease

    @rule(lease=leases)
    def begin(self, lease):
        each = self.model.get(lease)
        if each is None:
            return
        may = each["state"] == "active" and self.clock.now_s() < each["last" if each["open"] else "until"]
        try:
            self.table.begin(each["session"], lease, each["opcode"], each["offset"], each["length"])
        except LeaseExpired:
            assert not may
        else:
            assert may
            each["open"] += 1

    @rule(lease=leases, moved=st.booleans())
    def end(self, lease, moved):
        each = self.model.get(lease)
        if each is not None and each["open"]:
            each["open"] -= 1
            if moved and each["state"] == "active":
                self.prolong(each)
            self.settle(self.table.end(lease, moved=moved))

    def prolong(self, each) -> None:
        each["until"] = max(each["until"], min(self.clock.now_s() + 1, each["last"]))

    @rule(lease=consumes(leases))
    def release(self, lease):
        if lease in self.model:
            self.model[lease]["state"] = "over"
        self.settle(self.table.release(lease))

    @rule(seconds=st.sampled_from([0.005, 0.5, 2.0]))
    def pass_time(self, seconds):
        self.clock.advance(seconds)
        for each in self.model.values():
            if each["state"] == "active" and self.clock.now_s() >= each["until"] and each["open"]:
                self.prolong(each)
            if each["state"] == "active" and self.clock.now_s() >= each["until"]:
                each["state"] = "quarantined" if each["shm"] else "over"
        self.settle(self.table.expire(self.clock.now_s()))

    @rule(data=st.data(), exited=st.booleans())
    def lose_session(self, data, exited):
        if not self.sessions:
            return
        session_id = data.draw(st.sampled_from(sorted(self.sessions)))
        for each in self.model.values():
            if each["session"] == session_id:
                kept = each["shm"] and not exited and each["state"] in ("active", "quarantined")
                each["state"] = "quarantined" if kept else "over"
        self.settle(self.table.session_exited(session_id) if exited else self.table.close_session(session_id))
        if exited or not self.table.has_session(session_id):
            del self.sessions[session_id]
        else:
            self.lost = session_id
            del self.sessions[session_id]

    def settle(self, freed: list[Freed]) -> None:
        """Exactly the leases that the model thinks free are told, once."""
        expected = {key for key, each in self.model.items() if each["state"] == "over" and not each["open"]}
        assert {each.lease_id for each in freed} == expected
        assert len(freed) == len(expected)
        for key in expected:
            del self.model[key]

    @invariant()
    def agrees(self) -> None:
        self.table.check()
        assert self.table.num_leases == len(self.model)
        for at in range(0, 95, 7):
            held = any(each["offset"] <= at < each["offset"] + each["length"] for each in self.model.values())
            assert self.table.busy(at, 1) == held


AccessMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAccessMachine = AccessMachine.TestCase
