"""When a new master may take its ignorance for an answer."""

from __future__ import annotations

import pytest

from tanghulu.store.master.directory.announcement import Announced, ChunkEntry, NodeAnnouncement, ReportPiece
from tanghulu.store.master.directory.directory import Directory
from tanghulu.store.master.directory.rebuild import ALONE_S, TRANSITIONS, Membership, MembershipEvent
from tanghulu.store.protocol.key_slots import NUM_SLOTS, slot_of
from tests.store.master.running_master import instance


def make(*names: str, **values) -> Directory:
    made = Directory(0.0, **values)
    for name in names:
        made.node_registered(instance(name), 0.0)
    return made


def report(directory: Directory, name: str) -> None:
    directory.announce(NodeAnnouncement(name, 7, report_id=1, piece=ReportPiece(0, NUM_SLOTS)), 0.0)
    directory.check()


def tell(directory: Directory, name: str, report_id: int, piece: ReportPiece) -> Announced:
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
        assert not directory.rebuild.is_ready
        report(directory, name)
    assert directory.rebuild.is_ready


def test_a_master_without_nodes_is_ready_when_none_can_come() -> None:
    directory = make(rebuild_s=3.0)
    directory.tick(2.99)
    assert not directory.rebuild.is_ready
    directory.tick(3.0)
    assert directory.rebuild.is_ready


def test_a_new_node_that_reports_first_does_not_speak_for_those_that_were_there_before() -> None:
    directory = make("new", rebuild_s=3.0)
    report(directory, "new")
    assert directory.rebuild.state is Membership.FRESH
    directory.tick(ALONE_S - 0.01)
    assert not directory.rebuild.is_ready
    directory.rebuild.handle(MembershipEvent.STRAY_LEASE)
    directory.tick(ALONE_S)
    assert directory.rebuild.state is Membership.REBUILDING


def test_a_report_counts_once_nobody_else_has_come() -> None:
    directory = make("only", rebuild_s=3.0)
    report(directory, "only")
    directory.tick(ALONE_S)
    assert directory.rebuild.is_ready


def test_a_successor_that_was_told_its_nodes_waits_for_no_others() -> None:
    directory = make("a", rebuild_s=3.0, expected=frozenset({"a"}))
    report(directory, "a")
    assert directory.rebuild.is_ready


def test_a_node_that_goes_is_not_waited_for() -> None:
    directory = make("a", "b")
    directory.tick(ALONE_S)
    report(directory, "a")
    directory.node_gone("b")
    assert directory.rebuild.is_ready


def test_a_successor_waits_for_nodes_that_it_has_not_heard_of() -> None:
    directory = make("a", rebuild_s=3.0)
    directory.rebuild.handle(MembershipEvent.STRAY_LEASE)
    report(directory, "a")
    assert directory.rebuild.state is Membership.REBUILDING
    directory.tick(3.0)
    assert directory.rebuild.is_ready


def test_a_node_that_its_predecessor_knew_is_waited_for_until_its_lease_is_over() -> None:
    directory = make("a", rebuild_s=3.0, expected=frozenset({"a", "b"}))
    report(directory, "a")
    directory.tick(2.9)
    assert not directory.rebuild.is_ready
    directory.tick(3.0)
    assert directory.rebuild.is_ready


def test_slots_become_known_one_after_the_other() -> None:
    directory = make("a", "b", expected=frozenset({"a", "b"}))
    low, high = "kv/k13", "kv/a"
    assert (slot_of(low), slot_of(high)) == (158, 812)
    tell(directory, "a", 1, ReportPiece(0, NUM_SLOTS))
    tell(directory, "b", 1, ReportPiece(0, 300))
    assert not directory.is_incomplete([low], [None])
    assert directory.is_incomplete([low, high], [None, None])
    assert not directory.is_incomplete([low, high], [None, object()])
    assert directory.rebuild.num_known_slots == 300
    tell(directory, "b", 1, ReportPiece(1, NUM_SLOTS, [(high, 1, 10, 0)]))
    assert directory.rebuild.is_ready


def test_a_put_meanwhile_does_not_replace_a_chunk_that_is_reported_later() -> None:
    directory = make("a", "b", expected=frozenset({"a", "b"}))
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
    directory = make("a", "b", expected=frozenset({"a", "b"}))
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
