"""The node's decisions in virtual time; ``check()`` after every step."""

from __future__ import annotations

import gc

import pytest

from tanghulu.errors import InvalidRequest, LeaseExpired, StoreFull
from tanghulu.store.node.space.space import MAX_CARVED
from tanghulu.store.node.state import outbox
from tanghulu.store.node.state.chunk import TRANSITIONS, Chunk, ChunkEvent, ChunkState, compact
from tanghulu.store.node.state.confirmations import ReportOutcome
from tanghulu.store.node.state.counters import EvictionReason
from tanghulu.store.node.state.node_state import NodeState
from tanghulu.store.node.state.outbox import MAX_RETRACTED
from tanghulu.store.node.state.outcomes import Existed, Reserved, Waiter
from tanghulu.store.node.state.reports import NodeReports
from tanghulu.store.protocol.checksums import Checksums
from tanghulu.store.protocol.key_slots import NUM_RANGES, NUM_SLOTS, RANGE_SLOTS, slot_of
from tanghulu.store.protocol.types import Pin
from tanghulu.types import ChunkKey
from tests.store.node.rig import (
    CAPACITY,
    COPIES,
    GENERATION,
    LEASE_MS,
    MAPS,
    SUM,
    commit,
    keys,
    make_state,
    new,
    put,
    reserve_or_wait,
)
from tests.virtual.clock import ManualClock

# --- states


def known_below(num_slots: int) -> bytes:
    """The slots of each range that a master knows which knows the first ``num_slots`` of all."""
    return bytes(min(max(num_slots - number * RANGE_SLOTS, 0), RANGE_SLOTS) for number in range(NUM_RANGES))


def test_unknown_transitions_raise() -> None:
    state = make_state()
    outcome = reserve_or_wait(state, new("a"), None)
    assert isinstance(outcome, Reserved)
    chunk = outcome.chunk
    for event in ChunkEvent:
        if (chunk.state, event) not in TRANSITIONS:
            with pytest.raises(AssertionError):
                chunk.step(event)
    assert all(state is not ChunkState.GONE for state, _ in TRANSITIONS)


def test_a_chunk_is_served_once_the_master_took_it() -> None:
    state = make_state()
    outcome = reserve_or_wait(state, new("a"), COPIES)
    assert isinstance(outcome, Reserved)
    assert state.chunks.find(ChunkKey("a")) is None
    commit(state, outcome.lease_id, 1, SUM, visible=True)
    assert state.chunks.find(ChunkKey("a")) is None, "announcing"
    message = state.reports.leader.take()
    assert [c.key for c in message.added] == ["a"]
    state.reported(message.added[0], accepted=True)
    state.reports.leader.done()
    assert state.chunks.find(ChunkKey("a")) is not None
    state.check()


def test_chunks_of_a_size_share_its_int() -> None:
    """A million of them would have 32 MB of ints that are equal."""
    state, sizes = make_state(), [int.from_bytes(b"\x03\xe8") for _ in range(2)]
    assert sizes[0] is not sizes[1]
    chunks = [put(state, new(key, size)).chunk for key, size in zip("ab", sizes, strict=True)]
    assert chunks[0].size_bytes is chunks[1].size_bytes


def test_the_loser_of_concurrent_puts_drops_its_copy() -> None:
    state = make_state()
    outcome = reserve_or_wait(state, new("a"), COPIES)
    assert isinstance(outcome, Reserved)
    commit(state, outcome.lease_id, 1, SUM, visible=True)
    state.reported(outcome.chunk, accepted=False)
    assert state.chunks.used_bytes == 0
    assert outcome.chunk.state is ChunkState.GONE
    state.check()


def test_two_reservations_of_one_key_end_as_one_chunk() -> None:
    state = make_state()
    first, second = reserve_or_wait(state, new("a"), COPIES), reserve_or_wait(state, new("a", version=2), MAPS)
    assert isinstance(first, Reserved)
    assert isinstance(second, Reserved)
    assert isinstance(commit(state, second.lease_id, 2, SUM, visible=False), Reserved)
    assert isinstance(commit(state, first.lease_id, 1, SUM, visible=False), Existed)
    found = state.chunks.find(ChunkKey("a"))
    assert found is not None
    assert found.version == 2
    assert state.chunks.used_bytes == 64
    state.check()


# --- room


def test_the_oldest_go_and_a_touched_prefix_stays_longest() -> None:
    state = make_state()
    for i in range(64):
        put(state, new(f"k{i:02}"))
    chunks = [state.chunks.find(ChunkKey(f"k{i:02}")) for i in range(4)]
    state.chunks.touch([c for c in chunks if c is not None])
    for i in range(61):
        put(state, new(f"n{i:02}"))
    assert [k for k in keys(state) if k.startswith("k")] == ["k00", "k01", "k02"], "k03 is the tail: it goes first"
    state.check()


def test_soft_pins_go_last_and_hard_pins_never() -> None:
    state = make_state()
    put(state, new("hard", pin=Pin.HARD))
    put(state, new("soft", pin=Pin.SOFT))
    for i in range(200):
        put(state, new(f"k{i}"))
    assert "soft" in keys(state)
    put(state, new("huge", CAPACITY - 64))
    assert keys(state) == ["hard", "huge"]
    with pytest.raises(StoreFull, match="hard pins"):
        reserve_or_wait(state, new("hard2", CAPACITY // 4, pin=Pin.HARD), None)
    again = new("hard", CAPACITY // 4, pin=Pin.HARD)
    assert isinstance(put(state, again), Existed), "a second put is a hit"
    state.check()


def test_a_hard_pin_keeps_a_chunk_that_others_hold_and_none_that_was_removed() -> None:
    state = make_state()
    chunk = put(state, new("hard", pin=Pin.HARD)).chunk
    state.chunks.let_go(chunk.key, chunk.version)
    state.chunks.let_go(chunk.key, chunk.version + 1, removed=True)
    assert keys(state) == ["hard"], "another node has a copy, or another version was removed"
    state.chunks.let_go(chunk.key, chunk.version, removed=True)
    assert keys(state) == []
    assert state.chunks.table.hard_pinned_bytes == 0
    state.check()


def test_hard_pins_that_waited_stay_within_their_bound() -> None:
    state = make_state()
    writing = reserve_or_wait(state, new("all", CAPACITY), COPIES)
    assert isinstance(writing, Reserved)
    waiting = [reserve_or_wait(state, new(f"hard{i}", CAPACITY // 4, pin=Pin.HARD), None) for i in range(3)]
    assert all(isinstance(each, Waiter) for each in waiting)
    state.leases.freed(state.leases.access.release(writing.lease_id))
    outcomes = [type(outcome) for _, outcome in state.admit_waiters()]
    assert outcomes == [Reserved, StoreFull, StoreFull]
    assert state.chunks.table.hard_pinned_bytes == CAPACITY // 4
    state.check()


def test_a_large_value_evicts_the_oldest_and_moves_the_rest_out_of_its_way() -> None:
    state = make_state()
    order = [(i * 37) % 64 for i in range(64)]  # neighbours in memory are far apart in age
    for i in range(64):
        put(state, new(f"k{i}"))
    for i in order:
        chunk = state.chunks.find(ChunkKey(f"k{i}"))
        assert chunk is not None
        state.chunks.touch([chunk])
    put(state, new("large", 16 * 64))
    assert keys(state) == sorted(["large", *(f"k{i}" for i in order[16:])])
    assert state.chunks.space.num_moved > 0
    state.check()


def test_leases_stand_in_the_way_and_nothing_is_dropped_in_vain() -> None:
    state = make_state()
    for i in range(4):
        put(state, new(f"k{i}", CAPACITY // 4))
    pins = [
        state.leases.pin(chunk, COPIES) for i in (1, 3) if (chunk := state.chunks.find(ChunkKey(f"k{i}"))) is not None
    ]
    waiter = reserve_or_wait(state, new("large", CAPACITY // 2), None)
    assert isinstance(waiter, Waiter)
    survivors = keys(state)
    assert state.admit_waiters() == []
    assert state.admit_waiters() == []
    assert keys(state) == survivors
    small = reserve_or_wait(state, new("small"), None)
    assert isinstance(small, Waiter), "no overtaking"
    state.leases.unpin([pins[0].lease_id], {1})
    served = state.admit_waiters()
    assert [w for w, _ in served] == [waiter, small]
    state.check()


def test_a_waiter_that_gives_up_lets_the_next_one_in() -> None:
    state = make_state()
    put(state, new("k", CAPACITY // 2))
    chunk = state.chunks.find(ChunkKey("k"))
    assert chunk is not None
    state.leases.pin(chunk, COPIES)
    large = reserve_or_wait(state, new("large", CAPACITY), None)
    assert isinstance(large, Waiter)
    small = reserve_or_wait(state, new("small"), None)
    assert isinstance(small, Waiter)
    assert isinstance(state.give_up_waiting(large), StoreFull)
    assert [w for w, _ in state.admit_waiters()] == [small]


def test_values_that_never_fit_are_refused_at_the_edge() -> None:
    state = make_state()
    for size in (0, CAPACITY + 1):
        with pytest.raises(InvalidRequest):
            reserve_or_wait(state, new("a", size), None)


# --- leases


def test_a_mapped_reservation_outlives_its_time_until_the_process_exits() -> None:
    clock = ManualClock()
    state = make_state(clock)
    copied, mapped = reserve_or_wait(state, new("a"), COPIES), reserve_or_wait(state, new("b"), MAPS)
    assert isinstance(copied, Reserved)
    assert isinstance(mapped, Reserved)
    clock.advance(LEASE_MS / 1000 + 1)
    state.expire(clock.now_s())
    assert state.chunks.used_bytes == 64, "the peer of b may still write"
    for lease, session in ((copied.lease_id, 1), (mapped.lease_id, 2)):
        with pytest.raises(LeaseExpired):
            commit(state, lease, session, SUM, visible=False)
    state.session_exited(2)
    assert state.chunks.used_bytes == 0
    state.check()


def test_beyond_its_cap_a_mapping_client_gets_copies() -> None:
    state = make_state(mapped_bytes=100)
    first, second = reserve_or_wait(state, new("a"), MAPS), reserve_or_wait(state, new("b"), MAPS)
    assert isinstance(first, Reserved)
    assert isinstance(second, Reserved)
    assert (first.copies_only, second.copies_only) == (False, True)


def test_removed_chunks_keep_their_range_while_somebody_reads() -> None:
    state = make_state()
    put(state, new("a"))
    chunk = state.chunks.find(ChunkKey("a"))
    assert chunk is not None
    one, two = state.leases.pin(chunk, COPIES), state.leases.pin(chunk, MAPS)
    assert state.chunks.remove(ChunkKey("a"))
    assert not state.chunks.remove(ChunkKey("a"))
    assert state.chunks.find(ChunkKey("a")) is None
    state.leases.unpin([one.lease_id, 999], {1})
    assert state.chunks.used_bytes == 64
    state.leases.unpin([two.lease_id], {1})
    assert state.chunks.used_bytes == 64, "not this session's"
    state.leases.unpin([two.lease_id], {2})
    assert state.chunks.used_bytes == 0
    state.check()


def test_a_client_that_came_back_keeps_what_it_says_it_holds() -> None:
    state = make_state()
    put(state, new("a"))
    put(state, new("b"))
    leases = [
        state.leases.pin(chunk, MAPS).lease_id
        for key in "ab"
        if (chunk := state.chunks.find(ChunkKey(key))) is not None
    ]
    state.close_session(2)
    assert len(state.leases) == 2, "quarantined"
    state.leases.release_unheld({2}, {leases[1]})
    assert len(state.leases) == 1
    state.leases.unpin([leases[1]], {2})
    assert len(state.leases) == 0
    state.check()


def test_time_to_live() -> None:
    clock = ManualClock()
    state = make_state(clock)
    put(state, new("a", ttl_s=1.0))
    clock.advance(1.0)
    assert state.chunks.find(ChunkKey("a")) is None
    assert isinstance(put(state, new("a", version=2)), Reserved), "an expired key can be put again at once"
    put(state, new("b", ttl_s=1.0))
    clock.advance(2.0)
    state.expire(clock.now_s())
    assert keys(state) == ["a"]
    state.check()


def test_chunks_that_go_before_their_end_leave_nothing_behind() -> None:
    clock = ManualClock()
    state = make_state(clock)
    for i in range(1000):
        put(state, new(f"k{i}", ttl_s=86400.0 + i % 7))
    assert len(keys(state)) == CAPACITY // 64
    assert len(state.chunks.table._ends) == CAPACITY // 64
    state.check()
    clock.advance(86400.0 + 3)
    state.expire(clock.now_s())
    assert all(chunk.expires_s is not None and chunk.expires_s > clock.now_s() for chunk in state.chunks.table)
    state.check()
    clock.advance(4.0)
    state.expire(clock.now_s())
    assert keys(state) == []
    assert not state.chunks.table._ends
    state.check()


# --- announcements


def test_a_failed_message_is_told_again_unless_it_is_outdated() -> None:
    state = make_state()
    put(state, new("a"))
    put(state, new("b"))
    queue = state.reports.leader
    assert {c.key for c in queue.take().added} == {"a", "b"}
    state.chunks.remove(ChunkKey("a"))
    put(state, new("c"))
    queue.requeue()
    message = queue.take()
    assert sorted(c.key for c in message.added) == ["b", "c"]
    assert message.deleted == [("a", 1)]
    queue.done()
    assert queue.empty


def test_puts_that_came_to_nothing_are_retracted_once() -> None:
    """Whichever way: given back, its lease ended, its checksums wrong, or after a put of the key that was faster."""
    state = make_state()
    queue = state.reports.leader
    back, ended, wrong, late = (reserve_or_wait(state, new(key), COPIES) for key in "abcd")
    assert isinstance(back, Reserved)
    assert isinstance(ended, Reserved)
    assert isinstance(wrong, Reserved)
    assert isinstance(late, Reserved)
    state.leases.unpin([back.lease_id], {1})
    with pytest.raises(InvalidRequest):
        commit(state, wrong.lease_id, 1, Checksums(32, (1, 2, 3)), visible=True)
    put(state, new("d", version=9))
    assert isinstance(commit(state, late.lease_id, 1, SUM, visible=True), Existed)
    state.leases.freed(state.leases.access.release(ended.lease_id))
    message = queue.take()
    assert sorted(message.retracted) == [("a", 1), ("b", 1), ("c", 1), ("d", 1)]
    queue.requeue()
    assert queue.take().retracted == []
    queue.done()
    again, other = reserve_or_wait(state, new("a"), COPIES), reserve_or_wait(state, new("a", version=2), COPIES)
    assert isinstance(again, Reserved)
    assert isinstance(other, Reserved)
    assert not state.is_commit_valid(again.chunk, GENERATION), "the retraction may arrive behind the commit"
    assert state.is_commit_valid(other.chunk, GENERATION)
    # a second try of a put: what the first one left must not end it
    first, second = reserve_or_wait(state, new("e"), COPIES), reserve_or_wait(state, new("e"), COPIES)
    assert isinstance(first, Reserved)
    assert isinstance(second, Reserved)
    commit(state, second.lease_id, 1, SUM, visible=True)
    state.leases.unpin([first.lease_id], {1})
    assert queue.take().retracted == []
    state.check()


def test_withdrawals_are_bounded() -> None:
    reports = NodeReports()
    for version in range(MAX_RETRACTED + 10):
        reports.retract(ChunkKey("k"), version)
    assert len(reports.leader.take().retracted) == MAX_RETRACTED
    reports.leader.done()
    reports.retract(ChunkKey("k"), 10**6)
    assert reports.has_retracted(ChunkKey("k"), 10**6)
    assert not reports.has_retracted(ChunkKey("k"), 0)
    reports.check()


def awaited_put(state: NodeState, key: str) -> tuple[Chunk, list[list[ReportOutcome]]]:
    """A put that waits for the master's word, and where the words will come."""
    words: list[list[ReportOutcome]] = []
    chunk = put(state, new(key)).chunk
    assert isinstance(chunk, Chunk)
    assert state.reports.confirm([chunk], 5.0, words.append)
    return chunk, words


def test_a_put_of_what_is_removed_before_it_is_reported_does_not_wait_for_its_deadline() -> None:
    state = make_state()
    _, words = awaited_put(state, "a")
    state.reports.settle_gone()
    assert not words, "the master is still to be asked"
    assert state.chunks.remove(ChunkKey("a"))
    state.reports.settle_gone()
    assert words == [[True]]
    state.check()


@pytest.mark.parametrize("arrives", [True, False])
def test_a_put_of_what_is_removed_while_its_report_is_under_way_ends_with_that(arrives: bool) -> None:
    state = make_state()
    chunk, words = awaited_put(state, "a")
    message = state.reports.leader.take()
    assert message.added == [chunk]
    assert state.chunks.remove(ChunkKey("a"))
    state.reports.settle_gone()
    assert not words, "the master's answer is on its way"
    if arrives:
        state.reports.leader.done()
        state.reported(chunk, accepted=False)
    else:
        state.reports.leader.requeue()
    state.reports.settle_gone()
    assert words == [[not arrives]]
    state.check()


def sort_reports(state: NodeState) -> None:
    while (chunks := state.reports.unsorted) is not None:
        chunks.sort(100)


def test_a_report_comes_in_pieces() -> None:
    state = make_state()
    put(state, new("a"))
    queue = state.reports.leader
    queue.take()
    queue.done()
    state.reported(next(iter(state.chunks.table)), accepted=True)
    put(state, new("b"))  # which no master has confirmed
    state.report_all()
    sort_reports(state)
    message = queue.take()
    assert message.report_id, "it waits until it is granted"
    assert (message.piece, [c.key for c in message.added]) == (None, ["b"])
    assert [state.reports.is_unconfirmed(c) for c in message.added] == [True]
    queue.done()
    queue.granted(10, known_below(0))
    assert queue.urgent
    for _ in range(2):
        message = queue.take()
        assert message.piece is not None
        assert ([c.key for c in message.piece.chunks], message.piece.number) == (["a"], 0)
        assert message.piece.next_slot == NUM_SLOTS
        if _ == 0:
            queue.requeue()
            assert queue.take().piece is None, "a grant ends with the connection"
            queue.done()
            queue.granted(10, known_below(0))
    queue.done()
    assert not queue.waits_for_master


def test_a_put_that_the_master_cannot_decide_waits_until_its_slot_is_known() -> None:
    state = make_state()
    put(state, new("k"))
    queue = state.reports.leader
    message = queue.take()
    (chunk,) = message.added
    queue.done()
    queue.granted(0, known_below(slot_of("k")))  # all slots below its own
    queue.again(chunk)
    state.check()
    assert queue.is_pending(chunk)
    assert queue.empty
    assert queue.waits_for_master
    queue.granted(0, known_below(slot_of("k") + 1))
    message = queue.take()
    assert message.added == [chunk]
    assert state.reports.is_unconfirmed(chunk)


def test_removals_that_no_master_takes_are_bounded_and_end_in_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "MAX_QUEUED_REMOVALS", 10)
    state = make_state()
    queue = state.reports.leader
    for number in range(30):
        put(state, new(f"k{number}"))
        state.chunks.evict(next(iter(state.chunks.table)))
        queue.check()
    put(state, new("stays"))
    flushed: list[str] = []
    state.reports.flush(lambda: flushed.append("done"))
    message = queue.take()
    assert [c.key for c in message.added] == ["stays"], "an addition does not wait for removals"
    queue.done()
    state.reported(message.added[0], accepted=True)
    assert queue.report_wanted
    assert not queue.removals_acknowledged
    state.report_all()
    sort_reports(state)
    queue.granted(100, known_below(0))
    message = queue.take()
    assert message.piece is not None
    assert [c.key for c in message.piece.chunks] == ["stays"]
    assert not flushed
    queue.done()
    assert flushed
    assert queue.removals_acknowledged
    assert not queue.report_wanted


def test_a_flush_waits_for_the_removals_before_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many follow, and though messages are lost."""
    monkeypatch.setattr(outbox, "MAX_REMOVED", 2)
    state = make_state()
    queue, flushed, evicted = state.reports.leader, list[str](), list[str]()

    def evict(num: int) -> None:
        for _ in range(num):
            key = f"k{len(evicted)}"
            evicted.append(key)
            state.chunks.evict(put(state, new(key)).chunk)

    def sent() -> list[str]:
        return [key for key, _ in queue.take().removed]

    evict(3)
    lost = sent()
    state.reports.flush(lambda: flushed.append("done"))
    evict(3)
    queue.requeue()
    acknowledged: list[str] = []
    while not flushed:
        acknowledged += sent()
        evict(2)
        assert not flushed
        queue.done()
    assert set(evicted[:3]) <= set(acknowledged)
    assert lost == evicted[:2]
    assert not queue.removals_acknowledged
    state.check()


def test_a_flush_waits_for_a_removal_that_is_repeated_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "MAX_REMOVED", 1)
    state = make_state()
    queue, flushed = state.reports.leader, list[str]()
    for key in ("first", "again"):
        put(state, new(key))
        state.chunks.remove(ChunkKey(key))
    state.reports.flush(lambda: flushed.append("done"))
    put(state, new("again"))
    state.chunks.remove(ChunkKey("again"))
    for key in ("first", "again"):
        assert not flushed
        assert [each.key for each in queue.take().deleted] == [key]
        queue.done()
    assert flushed


@pytest.mark.parametrize("checksums", [Checksums(), Checksums(0, (2**64 - 1,)), Checksums(4, (7, 8))])
def test_a_chunk_keeps_its_facts_in_little_room(checksums: Checksums) -> None:
    chunk = Chunk.reserved(ChunkKey("k"), 2**64 - 1, 64, 8, compact(checksums), Pin.SOFT, 12345.678, replicas=3)
    assert (chunk.pin, chunk.replicas) == (Pin.SOFT, 3)
    assert (chunk.version, chunk.checksums, chunk.created_s) == (2**64 - 1, checksums, 12345.678)
    assert not gc.is_tracked(chunk), "a million of them would make each full collection last 0.2 s"
    chunk.compact_checksums = 5
    assert (chunk.version, chunk.checksums, chunk.created_s) == (2**64 - 1, Checksums(0, (5,)), 12345.678)


def test_a_write_buffer_takes_the_room_of_a_few_chunks_at_a_time() -> None:
    state = make_state(capacity_bytes=4000 * 64)
    for number in range(4000):
        put(state, new(f"k{number}"))
    taken = state.chunks.carve(2000 * 64, 8 * 64)
    assert taken is not None
    assert 8 * 64 <= taken[1] <= MAX_CARVED * 64
    assert state.chunks.counters.evictions_by[EvictionReason.WRITE_BUFFER] == MAX_CARVED
    state.chunks.space.allocator.free(*taken)
    state.check()
