"""When a new master may take its ignorance for an answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tanghulu.discovery.base import HOLDS_NOTHING
from tanghulu.store.master.directory.ranges import RangeDirectories
from tanghulu.store.master.directory.rebuild import ALONE_S, TRANSITIONS, Membership, MembershipEvent, Rebuild
from tanghulu.store.protocol.announcements import AnnounceReply, ChunkEntry, NodeAnnouncement, ReportPiece
from tanghulu.store.protocol.key_slots import ALL_BITS, NUM_RANGES, NUM_SLOTS, RANGE_SLOTS, range_of, slot_of
from tanghulu.store.protocol.messages import Location
from tanghulu.store.protocol.types import ClientCommit, CommitResult
from tanghulu.types import ChunkKey
from tests.store.master.running_master import instance


def make(*names: str, **values) -> RangeDirectories:
    made = RangeDirectories(0.0, **values)
    for name in names:
        made.node_registered(instance(name), 0.0)
    return made


def counted(*names: str) -> RangeDirectories:
    """One whose nodes are all there are."""
    made = make(*names)
    made.tick(ALONE_S)
    return made


def report(directory: RangeDirectories, name: str) -> None:
    directory.announce(NodeAnnouncement(name, 7, report_id=1, piece=ReportPiece(0, NUM_SLOTS)), 0.0)
    directory.check()


def tell(directory: RangeDirectories, name: str, report_id: int, piece: ReportPiece) -> AnnounceReply:
    answer = directory.announce(NodeAnnouncement(name, 7, report_id=report_id, piece=piece), 0.0)
    directory.check()
    return answer


@pytest.mark.parametrize("is_report_first", [True, False])
def test_time_alone_makes_nothing_known(is_report_first: bool) -> None:
    directory = make("a", "b", rebuild_s=3.0)
    if is_report_first:
        directory.tick(ALONE_S)
    else:
        directory.tick(1000.0)
    for name in ("a", "b"):
        assert not directory.is_ready
        report(directory, name)
    assert directory.is_ready


def test_a_master_without_nodes_is_ready_when_none_can_come() -> None:
    directory = make(rebuild_s=3.0)
    directory.tick(2.99)
    assert not directory.is_ready
    directory.tick(3.0)
    assert directory.is_ready


def test_a_new_node_that_reports_first_does_not_speak_for_those_that_were_there_before() -> None:
    directory = make("new", rebuild_s=3.0)
    report(directory, "new")
    assert directory.cluster.state is Membership.FRESH
    directory.tick(ALONE_S - 0.01)
    assert not directory.is_ready
    directory.cluster.handle(MembershipEvent.STRAY_LEASE)
    directory.tick(ALONE_S)
    assert directory.cluster.state is Membership.REBUILDING


def test_a_report_counts_once_nobody_else_has_come() -> None:
    directory = make("only", rebuild_s=3.0)
    report(directory, "only")
    directory.tick(ALONE_S)
    assert directory.is_ready


def test_a_node_that_goes_is_not_waited_for() -> None:
    directory = make("a", "b")
    directory.tick(ALONE_S)
    report(directory, "a")
    directory.node_gone("b")
    assert directory.is_ready


def test_a_successor_waits_for_nodes_that_it_has_not_heard_of() -> None:
    directory = make("a", rebuild_s=3.0)
    directory.cluster.handle(MembershipEvent.STRAY_LEASE)
    report(directory, "a")
    assert directory.cluster.state is Membership.REBUILDING
    directory.tick(3.0)
    assert directory.is_ready


def test_slots_become_known_one_after_the_other() -> None:
    directory = counted("a", "b")
    low, high = "kv/k13", "kv/a"
    assert (slot_of(low), slot_of(high)) == (158, 812)
    tell(directory, "a", 1, ReportPiece(0, NUM_SLOTS))
    tell(directory, "b", 1, ReportPiece(0, 300))
    assert not directory.is_incomplete([low], [None])
    assert directory.is_incomplete([low, high], [None, None])
    assert not directory.is_incomplete([low, high], [None, object()])
    assert directory.num_known_slots == 300
    tell(directory, "b", 1, ReportPiece(1, NUM_SLOTS, [(high, 1, 10, 0)]))
    assert directory.is_ready


@given(st.lists(st.integers(0, NUM_SLOTS), max_size=6), st.text(min_size=1, max_size=9))
def test_each_range_counts_its_own_slots(told: list[int], key: str) -> None:
    ranges = [Rebuild(number) for number in range(NUM_RANGES)]
    assert not ranges[range_of(key)].knows(key)
    for num_slots in told:
        for number, each in enumerate(ranges):
            each.update(min(max(num_slots - RANGE_SLOTS * number, 0), RANGE_SLOTS))
    known = told[-1] if told else 0
    assert sum(each.num_known_slots for each in ranges) == known
    assert sum(each.is_ready for each in ranges) == known // RANGE_SLOTS
    assert range_of(key) == slot_of(key) // RANGE_SLOTS
    assert ranges[range_of(key)].knows(key) == (slot_of(key) < known)
    assert sum(each.is_rebuilt for each in ranges) == max(told, default=0) // RANGE_SLOTS


def test_a_range_is_ready_before_others_are() -> None:
    """A client's commit is taken, and a put decided, as soon as the key's range is known."""
    directory = counted("a")
    low, high = "kv/k13", "kv/a"
    tell(directory, "a", 1, ReportPiece(0, 500))
    committed = [directory.commit_by_client(ClientCommit("a", 7, ChunkKey(key), 1, 10), 0.0) for key in (low, high)]
    assert committed == [CommitResult.ACCEPTED, CommitResult.ASK_NODE]
    other = next(key for n in range(99) if slot_of(key := f"k{n}") < 500)
    added = [ChunkEntry(key, 1, 10, unconfirmed=True) for key in (high, other)]
    answer = directory.announce(NodeAnnouncement("a", 7, added, report_id=1), 0.0)
    assert (answer.accepted, answer.undecided) == ([False, True], [0])


LOW, HIGH = "kv/k13", "kv/a"  # of the slots 158 and 812


def grown() -> RangeDirectories:
    """One that knows all of the nodes a and b, of which b holds HIGH, and has then lost b."""
    directory = counted("a", "b")
    report(directory, "a")
    tell(directory, "b", 1, ReportPiece(0, NUM_SLOTS, [(HIGH, 1, 10, 0)]))
    assert directory.is_ready
    directory.node_gone("b")
    assert not directory.is_incomplete([LOW, HIGH], [None, None]), "nobody holds them"
    return directory


def test_what_a_node_that_comes_back_has_yet_to_tell_is_not_missing() -> None:
    directory = grown()
    directory.announce(NodeAnnouncement("a", 7, [ChunkEntry("known", 1, 10)]), 5.0)
    directory.node_registered(instance("b"), 5.0)
    assert directory.is_incomplete([LOW], [None])
    assert directory.is_incomplete([HIGH], [None])
    assert directory.holds(["known"]) == b"\1", "what is known is answered"
    fresh = [ChunkEntry(HIGH, 2, 10, unconfirmed=True)]
    assert directory.announce(NodeAnnouncement("a", 7, fresh), 5.0).undecided == [0], "of two the older one stays"
    assert directory.commit_by_client(ClientCommit("a", 7, ChunkKey(HIGH), 3, 10), 5.0) is CommitResult.ASK_NODE
    tell(directory, "b", 2, ReportPiece(0, 300))
    assert not directory.is_incomplete([LOW], [None]), "slot by slot"
    assert directory.is_incomplete([HIGH], [None])
    assert directory.is_rebuilt, "followers and the list of nodes go on meanwhile"
    assert directory.rebuilt_ranges == ALL_BITS
    tell(directory, "b", 2, ReportPiece(1, NUM_SLOTS, [(HIGH, 1, 10, 0)]))
    assert directory.is_ready
    assert directory.announce(NodeAnnouncement("a", 7, fresh), 5.0).accepted == [False]
    assert directory.find(HIGH) == Location(1, 10, ("b",), 1)


def test_a_node_that_comes_back_and_goes_again_is_not_waited_for() -> None:
    directory = grown()
    directory.node_registered(instance("b"), 5.0)
    assert directory.is_incomplete([HIGH], [None])
    directory.node_gone("b")
    assert not directory.is_incomplete([HIGH], [None])
    directory.check()


def test_a_new_node_that_holds_nothing_makes_nothing_unknown() -> None:
    """Nor does its report of nothing, however late it comes; and a report makes nothing unknown that is known."""
    directory = grown()
    directory.node_registered(instance("c", attributes={HOLDS_NOTHING: "true"}), 5.0)
    assert directory.is_ready
    for name in ("a", "c"):
        directory.announce(NodeAnnouncement(name, 7, report_id=9), 5.0)
        assert directory.is_ready
        tell(directory, name, 9, ReportPiece(0, 100))
        assert directory.is_ready
    directory.node_registered(instance("b", generation=8), 6.0)
    assert not directory.is_ready, "started again, with what is on its disk"


def test_what_followers_hear_while_a_node_that_came_back_reports() -> None:
    directory = grown()
    directory.node_registered(instance("b"), 5.0)
    last = directory.log.last
    tell(directory, "b", 2, ReportPiece(0, 1000, [(HIGH, 1, 10, 0)]))
    directory.announce(NodeAnnouncement("a", 7, [ChunkEntry(LOW, 1, 10)]), 5.0)
    assert not directory.is_ready
    assert [event.keys for _, event in directory.log.read(last, 100)] == [(HIGH,), (LOW,)]


def test_a_piece_whose_entries_are_in_no_order_is_taken() -> None:
    directory = counted("a")
    keys = [f"k{n}" for n in range(1000)]
    entries = [(key, 1, 10, 0) for key in keys]
    tell(directory, "a", 1, ReportPiece(0, NUM_SLOTS, entries))
    assert directory.holds(keys) == bytes([1]) * 1000
    assert tell(directory, "a", 1, ReportPiece(0, NUM_SLOTS, [(k, 2, 10, 0) for k in keys])).refused == []
    directory.node_registered(instance("b"), 0.0)
    mixed = [(key, 2 + n % 2, 10, 0) for n, key in enumerate(keys)]
    assert list(tell(directory, "b", 1, ReportPiece(0, NUM_SLOTS, mixed)).refused) == list(range(1, 1000, 2))


def test_a_put_meanwhile_does_not_replace_a_chunk_that_is_reported_later() -> None:
    directory = counted("a", "b")
    tell(directory, "a", 1, ReportPiece(0, 0))
    fresh = ChunkEntry("k", 2, 10, unconfirmed=True)
    for _ in range(2):
        answer = directory.announce(
            NodeAnnouncement("b", 7, [fresh], report_id=1, piece=ReportPiece(0, NUM_SLOTS)), 5.0
        )
        assert (answer.accepted, answer.undecided) == ([False], [0])
        assert directory.find("k") is None
    answer = tell(directory, "a", 1, ReportPiece(1, NUM_SLOTS, [("k", 1, 10, 0)]))
    assert list(answer.refused) == []
    answer = directory.announce(NodeAnnouncement("b", 7, [fresh]), 5.0)
    assert (answer.accepted, answer.undecided) == ([False], [])
    found = directory.find("k")
    assert found is not None
    assert (found.version, found.node_ids) == (1, ("a",))


def test_what_a_predecessor_confirmed_counts_at_once() -> None:
    directory = counted("a", "b")
    answer = directory.announce(NodeAnnouncement("b", 7, [ChunkEntry("k", 1, 10)]), 0.0)
    assert answer.accepted == [True]
    answer = directory.announce(NodeAnnouncement("a", 7, [ChunkEntry("k", 2, 10, unconfirmed=True)]), 0.0)
    assert (answer.accepted, answer.undecided) == ([False], []), "of two versions the confirmed one stays"


def test_a_node_is_asked_to_report_once_and_begins_again_when_its_report_is_not_known() -> None:
    directory = make("a")
    assert directory.announce(NodeAnnouncement("a", 7), 0.0).report_wanted
    assert not directory.announce(NodeAnnouncement("a", 7, report_id=1), 0.0).report_wanted
    assert tell(directory, "a", 1, ReportPiece(4, 100, [("k", 1, 10, 0)])).report_wanted
    assert directory.find("k") is None, "a piece that does not fit is not taken"
    assert not tell(directory, "a", 2, ReportPiece(0, 100, [("k", 1, 10, 0)])).report_wanted


def test_a_piece_may_come_twice() -> None:
    directory = make("a", "b")
    pieces = [ReportPiece(0, 10, [("x", 1, 10, 0)]), ReportPiece(1, NUM_SLOTS, [("y", 1, 10, 0)])]
    for piece in pieces:
        for _ in range(2):
            answer = tell(directory, "a", 1, piece)
            assert (list(answer.refused), answer.report_wanted) == ([], False)
    assert directory.num_chunks("a") == 2


def test_the_state_table_is_complete() -> None:
    assert set(TRANSITIONS) == {(state, event) for state in Membership for event in MembershipEvent}
