"""When a new master may take its ignorance for an answer."""

from __future__ import annotations

import pytest

from tanghulu.store.master.directory.announcement import NodeAnnouncement, ReportPart
from tanghulu.store.master.directory.directory import Directory
from tanghulu.store.master.directory.rebuild import ALONE_S, TRANSITIONS, Knowledge, RebuildEvent
from tests.store.master.running_master import instance


def make(*names: str, **values) -> Directory:
    made = Directory(0.0, **values)
    for name in names:
        made.node_registered(instance(name), 0.0)
    return made


def report(directory: Directory, name: str) -> None:
    for part in (ReportPart.BEGIN, ReportPart.END):
        directory.announce(NodeAnnouncement(name, 7, report=part), 0.0)
    directory.check()


@pytest.mark.parametrize("is_report_first", [True, False])
def test_fresh_master_is_ready_when_all_have_reported_or_time_is_up(is_report_first: bool) -> None:
    directory = make("a", "b", rebuild_s=3.0)
    if is_report_first:
        directory.tick(ALONE_S)
        for name in ("a", "b"):
            assert not directory.rebuild.is_ready
            report(directory, name)
    else:
        directory.tick(2.99)
        assert not directory.rebuild.is_ready
        directory.tick(3.0)
    assert directory.rebuild.is_ready


def test_a_new_node_that_reports_first_does_not_speak_for_those_that_were_there_before() -> None:
    directory = make("new", rebuild_s=3.0)
    report(directory, "new")
    assert directory.rebuild.state is Knowledge.FRESH
    directory.tick(ALONE_S - 0.01)
    assert not directory.rebuild.is_ready
    directory.rebuild.handle(RebuildEvent.STRAY_LEASE)
    directory.tick(ALONE_S)
    assert directory.rebuild.state is Knowledge.REBUILDING


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
    directory.rebuild.handle(RebuildEvent.STRAY_LEASE)
    report(directory, "a")
    assert directory.rebuild.state is Knowledge.REBUILDING
    directory.tick(3.0)
    assert directory.rebuild.is_ready


def test_the_state_table_is_complete() -> None:
    assert set(TRANSITIONS) == {(state, event) for state in Knowledge for event in RebuildEvent}
