"""What clients commit: when it counts, what confirms it, when it is taken back."""

from __future__ import annotations

import pytest

from tanghulu.store.master.directory import pending_commits
from tanghulu.store.master.directory.pending_commits import PENDING_S, PendingCommits
from tanghulu.store.master.directory.ranges import RangeDirectories
from tanghulu.store.master.directory.rebuild import ALONE_S
from tanghulu.store.protocol.announcements import ChunkEntry, NodeAnnouncement, Removal, ReportPiece
from tanghulu.store.protocol.key_slots import NUM_SLOTS
from tanghulu.store.protocol.types import MAX_ANNOUNCED, ClientCommit, CommitResult
from tanghulu.types import ChunkKey
from tests.store.master.running_master import instance, keys_of_one_range


def ready(*names: str, now_s: float = 0.0) -> RangeDirectories:
    """A directory whose nodes have reported that they are empty."""
    directory = RangeDirectories(now_s)
    for name in names:
        directory.node_registered(instance(name, generation=1), now_s)
    for name in names:
        directory.announce(NodeAnnouncement(name, 1, report_id=1, piece=ReportPiece(0, NUM_SLOTS)), now_s)
    directory.tick(now_s + ALONE_S)
    assert directory.is_ready
    return directory


def said(node: str, key: str, version: int = 1, generation: int = 1) -> ClientCommit:
    return ClientCommit(node, generation, ChunkKey(key), version, 100 + version)


def added(node: str, key: str, version: int = 1) -> NodeAnnouncement:
    return NodeAnnouncement(node, 1, added=[ChunkEntry(key, version, 100 + version)])


def holders(directory: RangeDirectories, key: str) -> tuple[str, ...]:
    directory.check()
    found = directory.find(key)
    return () if found is None else found.node_ids


def silent(directory: RangeDirectories, *names: str, now_s: float) -> None:
    """The time of what was committed is over, and the nodes do not name it, neither now nor with their next message."""
    directory.tick(now_s)
    for _ in range(2):
        for name in names:
            directory.announce(NodeAnnouncement(name, 1), now_s)


def test_what_is_committed_is_found_until_its_time_is_over() -> None:
    directory = ready("a")
    last = directory.log.last
    assert directory.commit_by_client(said("a", "k"), 10.0) is CommitResult.ACCEPTED
    assert holders(directory, "k") == ("a",)
    assert directory.holds(["k"]) == b"\1"
    directory.tick(10.0 + PENDING_S - 0.01)
    assert holders(directory, "k") == ("a",)
    silent(directory, "a", now_s=10.0 + PENDING_S)
    assert holders(directory, "k") == ()
    assert not directory.num_pending_commits
    events = [event for _, event in directory.log.read(last, 100)]
    assert [(event.kind.name, event.keys) for event in events] == [("STORED", ("k",)), ("REMOVED", ("k",))]


def test_time_alone_takes_nothing_back() -> None:
    """The master, or the node, stood still: the chunk is there, and its putter has been told so."""
    directory = ready("a", "b")
    for key in ("k", "m"):
        assert directory.commit_by_client(said("a", key), 10.0) is CommitResult.ACCEPTED
    directory.tick(60.0)
    directory.announce(NodeAnnouncement("a", 1), 60.0)  # it was under way
    silent(directory, "b", now_s=60.1)
    for _ in range(3):
        directory.announce(NodeAnnouncement("a", 1, map_version=1), 60.1)  # signs of life
        many = [ChunkEntry(f"x{n}", 1, 9) for n in range(MAX_ANNOUNCED)]
        directory.announce(NodeAnnouncement("a", 1, added=many), 60.1)  # there is more
    assert holders(directory, "k") == holders(directory, "m") == ("a",)
    assert directory.announce(added("a", "k"), 60.2).accepted == [True]
    assert (holders(directory, "k"), holders(directory, "m")) == (("a",), ())
    directory.tick(100.0)
    assert holders(directory, "k") == ("a",)


def test_a_put_that_came_to_nothing_is_retracted_by_its_node() -> None:
    directory = ready("a", "b")
    assert directory.commit_by_client(said("a", "k", version=5), 10.0) is CommitResult.ACCEPTED
    assert directory.announce(added("b", "k", version=6), 10.0).undecided == [0]
    last = directory.log.last
    for node, version in (("a", 4), ("b", 5)):  # another put, another node
        directory.announce(NodeAnnouncement(node, 1, retracted=[Removal("k", version)]), 10.1)
        assert holders(directory, "k") == ("a",)
    directory.announce(NodeAnnouncement("a", 1, retracted=[Removal("k", 5)]), 10.1)
    assert holders(directory, "k") == ()
    assert not directory.num_pending_commits
    assert directory.num_retracted == 1
    assert [event.kind.name for _, event in directory.log.read(last, 100)] == ["REMOVED"]
    assert directory.announce(added("b", "k", version=6), 10.2).accepted == [True], "who asked again comes next"


def test_an_older_chunk_that_a_node_holds_which_was_taken_for_gone_stays() -> None:
    """The master does not know it before the node has reported, and until then takes no client's commit of its key."""
    directory = ready("a")
    directory.node_gone("a")
    directory.node_registered(instance("a", generation=1), 9.0)
    assert directory.commit_by_client(said("a", "k", version=5), 10.0) is CommitResult.ASK_NODE
    piece = ReportPiece(0, NUM_SLOTS, [("k", 4, 104, 0)])
    assert directory.announce(NodeAnnouncement("a", 1, report_id=2, piece=piece), 10.1).refused == []
    assert directory.commit_by_client(said("a", "k", version=5), 10.2) is CommitResult.ASK_NODE
    found = directory.find("k")
    assert found is not None
    assert found.version == 4
    directory.tick(10.0 + PENDING_S)
    assert holders(directory, "k") == ("a",)


def test_what_is_announced_is_not_retracted() -> None:
    """A second try of the same put has come that far, at the same node."""
    directory = ready("a")
    assert directory.commit_by_client(said("a", "k", version=5), 10.0) is CommitResult.ACCEPTED
    directory.announce(added("a", "k", version=5), 10.1)
    directory.announce(NodeAnnouncement("a", 1, retracted=[Removal("k", 5)]), 10.2)
    assert holders(directory, "k") == ("a",)
    both = NodeAnnouncement("a", 1, added=[ChunkEntry("n", 7, 107)], retracted=[Removal("n", 7)])
    assert directory.commit_by_client(said("a", "n", version=7), 10.3) is CommitResult.ACCEPTED
    directory.announce(both, 10.3)
    assert holders(directory, "n") == ("a",)


def test_the_nodes_own_word_keeps_it() -> None:
    directory = ready("a")
    directory.commit_by_client(said("a", "k"), 10.0)
    assert directory.announce(added("a", "k"), 10.1).accepted == [True]
    directory.tick(100.0)
    assert holders(directory, "k") == ("a",)


def test_the_nodes_removal_ends_it() -> None:
    directory = ready("a")
    directory.commit_by_client(said("a", "k"), 10.0)
    directory.announce(NodeAnnouncement("a", 1, removed=[Removal("k", 1)]), 10.1)
    assert holders(directory, "k") == ()
    assert not directory.num_pending_commits


def test_a_removal_that_is_told_twice_does_not_touch_a_later_commit() -> None:
    directory = ready("a", "b")
    directory.announce(added("a", "k", version=1), 10.0)
    evicted = NodeAnnouncement("a", 1, removed=[Removal("k", 1)])
    directory.announce(evicted, 10.1)  # and its answer is lost
    assert directory.commit_by_client(said("a", "k", version=2), 10.2) is CommitResult.ACCEPTED
    directory.announce(evicted, 10.3)
    assert holders(directory, "k") == ("a",)
    assert directory.announce(added("b", "k", version=3), 10.4).accepted == [False]
    assert directory.announce(added("a", "k", version=2), 10.5).accepted == [True]


def test_a_node_does_not_announce_past_a_commit_that_it_has_yet_to_adopt() -> None:
    directory = ready("a")
    assert directory.commit_by_client(said("a", "k", version=2), 10.0) is CommitResult.ACCEPTED
    answer = directory.announce(added("a", "k", version=1), 10.1)
    assert (answer.accepted, answer.undecided) == ([False], [0])
    found = directory.find("k")
    assert found is not None
    assert found.version == 2
    assert directory.announce(added("a", "k", version=2), 10.2).accepted == [True]


def test_a_removal_by_a_client_is_final() -> None:
    directory = ready("a", "b")
    directory.commit_by_client(said("a", "k"), 10.0)
    directory.announce(
        NodeAnnouncement("b", 1, deleted=[Removal("k", 1)]), 10.1
    )  # asked to remove what it did not hold
    assert holders(directory, "k") == ()
    assert directory.announce(added("a", "k"), 10.2).accepted == [False], "its tombstone"
    assert directory.commit_by_client(said("a", "k"), 10.3) is CommitResult.ASK_NODE
    assert directory.commit_by_client(said("a", "k", version=2), 10.3) is CommitResult.ACCEPTED


def test_the_first_version_wins() -> None:
    directory = ready("a", "b")
    directory.announce(added("a", "k", version=1), 10.0)
    assert directory.commit_by_client(said("b", "k", version=2), 10.0) is CommitResult.EXISTS
    assert directory.commit_by_client(said("a", "k", version=2), 10.0) is CommitResult.ASK_NODE, (
        "it may have evicted it"
    )
    assert directory.commit_by_client(said("a", "new", version=3), 10.0) is CommitResult.ACCEPTED
    assert directory.announce(added("b", "new", version=4), 10.0).accepted == [False]
    assert directory.commit_by_client(said("b", "new", version=5), 10.0) is CommitResult.ASK_NODE, (
        "a promise is not a chunk"
    )


@pytest.mark.parametrize("node", ["a zombie", "unknown", "draining"])
def test_nodes_of_which_nothing_is_believed(node: str) -> None:
    directory = ready("a")
    match node:
        case "a zombie":
            assert directory.commit_by_client(said("a", "k", generation=2), 1.0) is CommitResult.ASK_NODE
        case "unknown":
            assert directory.commit_by_client(said("x", "k"), 1.0) is CommitResult.ASK_NODE
        case "draining":
            leaving = instance("a", generation=1)
            leaving.attributes["draining"] = "true"
            directory.node_registered(leaving, 1.0)
            assert directory.commit_by_client(said("a", "k"), 1.0) is CommitResult.ASK_NODE
    assert holders(directory, "k") == ()


def test_a_directory_that_is_not_complete_takes_no_clients_word() -> None:
    directory = RangeDirectories(0.0)
    directory.node_registered(instance("a", generation=1), 0.0)
    assert directory.commit_by_client(said("a", "k"), 1.0) is CommitResult.ASK_NODE


def test_a_report_does_not_swallow_what_its_node_has_not_read_yet() -> None:
    directory = ready("a")
    directory.commit_by_client(said("a", "before"), 10.0)
    directory.announce(NodeAnnouncement("a", 1, report_id=2, piece=ReportPiece(0, 0)), 10.0)
    directory.commit_by_client(said("a", "during"), 10.0)
    directory.announce(NodeAnnouncement("a", 1, report_id=2, piece=ReportPiece(1, NUM_SLOTS)), 10.1)
    while directory.sweep(100):
        pass
    assert holders(directory, "before") == ("a",)
    assert holders(directory, "during") == ("a",)
    silent(directory, "a", now_s=20.0)
    assert holders(directory, "before") == holders(directory, "during") == ()


def test_a_node_that_is_gone_takes_its_pending_commits_along() -> None:
    directory = ready("a", "b")
    directory.commit_by_client(said("a", "k"), 10.0)
    directory.node_gone("a")
    assert holders(directory, "k") == ()
    assert not directory.num_pending_commits
    assert directory.commit_by_client(said("b", "k", version=2), 10.1) is CommitResult.ACCEPTED
    directory.announce(added("b", "k", version=2), 10.2)
    directory.tick(20.0)
    assert holders(directory, "k") == ("b",)


def test_another_version_at_its_node_waits_for_the_end_of_a_pending_commit() -> None:
    directory = ready("a")
    directory.commit_by_client(said("a", "k", version=1), 10.0)
    answer = directory.announce(added("a", "k", version=2), 10.1)
    assert (answer.accepted, answer.undecided) == ([False], [0])
    silent(directory, "a", now_s=20.0)
    assert directory.announce(added("a", "k", version=2), 20.1).accepted == [True]
    assert holders(directory, "k") == ("a",)


def test_who_comes_second_to_a_promise_hears_what_became_of_it() -> None:
    """Neither a hit, for the first may never be written, nor the first, for it may be on its way."""
    directory = ready("a", "b")
    directory.commit_by_client(said("a", "broken", version=1), 10.0)
    directory.commit_by_client(said("a", "kept", version=1), 10.0)
    both = NodeAnnouncement(
        "b", 1, added=[ChunkEntry("own", 1, 9), ChunkEntry("broken", 2, 9), ChunkEntry("kept", 2, 9)]
    )
    answer = directory.announce(both, 10.1)
    assert answer.accepted[0]
    assert answer.undecided == [1, 2]
    assert directory.announce(added("a", "kept", version=1), 10.2).accepted == [True]
    silent(directory, "a", now_s=10.0 + PENDING_S)
    answer = directory.announce(both, 14.0)
    assert (answer.accepted, answer.undecided) == ([True, True, False], [])
    assert (holders(directory, "broken"), holders(directory, "kept")) == (("b",), ("a",))


def test_pending_commits_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_commits, "MAX_PENDING", 3)
    directory = ready("a")
    results = [directory.commit_by_client(said("a", key), 10.0) for key in keys_of_one_range(4)]
    assert results == [CommitResult.ACCEPTED] * 3 + [CommitResult.ASK_NODE]
    assert directory.num_pending_commits == 3


def test_the_books() -> None:
    kept = PendingCommits()
    kept.make("k", "a", 1, 10, 0.0)
    kept.make("m", "b", 1, 10, 1.0)
    kept.settle("k", "b", 1)
    assert "k" in kept, "another node has spoken"
    kept.settle("k", "a", 2)
    assert "k" in kept, "of another version"
    kept.make("k", "b", 2, 10, 2.0)
    assert [key for key, _ in kept.of("b")] == ["m", "k"]
    assert not kept.tick(0.0 + PENDING_S)
    assert kept.tick(1.0 + PENDING_S)
    kept.check()
    assert kept.take_overdue("a") == kept.take_overdue("b") == []
    assert kept.tick(2.0 + PENDING_S)
    kept.check()
    assert [key for key, _ in kept.take_overdue("b")] == ["m"]
    kept.check()
    assert [key for key, _ in kept.take_overdue("b")] == ["k"]
    assert kept.take_overdue("b") == []
    assert not kept
    kept.check()


def test_what_is_overdue_may_be_confirmed_and_put_again() -> None:
    kept = PendingCommits()
    for key, node in (("k", "a"), ("m", "a"), ("n", "b")):
        kept.make(key, node, 1, 10, 0.0)
    assert kept.tick(PENDING_S)
    assert kept.take_overdue("a") == []
    kept.settle("k", "a", 1)
    kept.make("m", "b", 2, 10, PENDING_S)
    kept.check()
    assert kept.take_overdue("a") == []
    assert kept.settle("n", "b", 1)
    kept.check()
    assert not kept.tick(PENDING_S)
    kept.forget_node("b")
    assert not kept
    kept.check()
