"""The lease table where a peer reaches ranges through queue pairs: nothing is free before they are gone."""

from __future__ import annotations

import pytest

from tanghulu.errors import InvalidRequest
from tanghulu.transfer_engine.core.access import AccessTable
from tanghulu.transfer_engine.core.slices import Opcode
from tests.virtual.clock import ManualClock


@pytest.fixture
def revoked() -> list[int]:
    return []


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def table(clock: ManualClock, revoked: list[int]) -> AccessTable:
    table = AccessTable(clock, lease_ms=1000, max_quarantined_bytes_per_session=1000)
    table.on_revoke = revoked.append
    table.open_session(7, 1234)
    return table


def test_an_expired_range_waits_for_the_last_queue_pair(table: AccessTable, clock: ManualClock, revoked: list[int]):
    table.begin_one_sided(7)
    table.begin_one_sided(7)
    read, write = table.grant(7, 0, 100, Opcode.READ), table.grant(7, 100, 100, Opcode.WRITE)
    clock.advance(2)
    assert table.expire(clock.now_s()) == []
    assert revoked == [7]
    assert table.busy(0, 200)
    assert table.end_one_sided(7) == []
    table.check()
    assert {each.lease_id for each in table.end_one_sided(7)} == {read, write}
    assert not table.busy(0, 200)
    table.check()


def test_a_range_that_is_given_back_is_free_at_once(table: AccessTable, revoked: list[int]):
    table.begin_one_sided(7)
    lease = table.grant(7, 0, 100, Opcode.WRITE)
    assert [each.lease_id for each in table.release(lease)] == [lease]
    assert revoked == []
    assert table.end_one_sided(7) == []
    table.check()


def test_a_late_giving_back_does_not_free_what_queue_pairs_reach(table: AccessTable, clock: ManualClock):
    table.begin_one_sided(7)
    lease = table.grant(7, 0, 100, Opcode.WRITE)
    clock.advance(2)
    table.expire(clock.now_s())
    assert table.release(lease) == []
    assert [each.lease_id for each in table.end_one_sided(7)] == [lease]


@pytest.mark.parametrize("end", ["close_session", "session_exited"])
def test_a_session_that_ends(table: AccessTable, revoked: list[int], end: str):
    table.begin_one_sided(7)
    lease = table.grant(7, 0, 100, Opcode.WRITE)
    assert getattr(table, end)(7) == []
    assert revoked == [7]
    assert table.has_session(7)
    table.check()
    assert [each.lease_id for each in table.end_one_sided(7)] == [lease]
    assert not table.has_session(7)
    table.check()


def test_a_session_that_ends_without_leases_is_kept_for_its_queue_pairs(table: AccessTable, revoked: list[int]):
    table.begin_one_sided(7)
    assert table.close_session(7) == []
    assert revoked == [7]
    table.check()
    assert table.end_one_sided(7) == []
    assert not table.has_session(7)
    with pytest.raises(InvalidRequest):
        table.begin_one_sided(7)


def test_mapped_ranges_stay_in_quarantine(table: AccessTable, clock: ManualClock, revoked: list[int]):
    table.begin_one_sided(7)
    lease = table.grant(7, 0, 100, Opcode.READ, shm=True)
    clock.advance(2)
    assert table.expire(clock.now_s()) == []
    assert revoked == []
    assert table.end_one_sided(7) == []
    assert table.quarantined_bytes == 100
    assert [each.lease_id for each in table.release(lease)] == [lease]
