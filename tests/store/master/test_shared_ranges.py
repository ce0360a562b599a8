"""The directory of one of several masters: ranges that come begin with nothing, and those that go are forgotten."""

from __future__ import annotations

import pytest

from tanghulu.store.master.core import LOST_GRACE_S, Master
from tanghulu.store.master.directory.inventories import InventoryState
from tanghulu.store.master.directory.listing import list_keys
from tanghulu.store.master.directory.ranges import RangeDirectories
from tanghulu.store.master.directory.rebuild import REBUILD_S, NodesInEtcd
from tanghulu.store.protocol.announcements import AnnounceReply, ChunkEntry, NodeAnnouncement, ReportPiece
from tanghulu.store.protocol.key_slots import NUM_RANGES, NUM_SLOTS, range_of, slot_of
from tests.store.master.running_master import instance

NODE = instance("n1")
KEYS = sorted((f"k{number}" for number in range(2000)), key=slot_of)
OWNED = 5
MINE = [key for key in KEYS if range_of(key) == OWNED]


def announce(directory: RangeDirectories, report_id: int = 0, **values: object) -> list[bool]:
    said = NodeAnnouncement("n1", NODE.generation, report_id=report_id, **values)  # type: ignore[arg-type]
    return directory.announce(said, 1.0).accepted


def announced(directory: RangeDirectories, report_id: int, piece: ReportPiece | None = None) -> AnnounceReply:
    """The answer to a part of a report of the ranges OWNED and 6."""
    numbers = frozenset({OWNED, 6})
    return directory.announce(
        NodeAnnouncement("n1", NODE.generation, report_id=report_id, piece=piece, ranges=numbers), 1.0
    )


def report(directory: RangeDirectories, report_id: int, keys: list[str]) -> None:
    announce(directory, report_id)
    announce(directory, report_id, piece=ReportPiece(0, NUM_SLOTS, [(key, 7, 100, 0) for key in keys]))


def owning(*numbers: int) -> RangeDirectories:
    """The directory of a master that owns these ranges, for the node n1, which etcd tells of."""
    cluster = NodesInEtcd(0.0)
    directory = RangeDirectories(0.0, cluster=cluster)
    directory.node_registered(NODE, 0.0)
    cluster.update(frozenset({"n1"}), 0.0)
    for number in numbers:
        directory.begin_range(number)
    directory.check()
    return directory


def test_who_owns_nothing_knows_nothing() -> None:
    directory = owning()
    assert not directory.is_ready
    assert directory.is_incomplete(MINE, bytes(len(MINE)))


def test_a_range_that_comes_is_known_when_every_node_has_told_it_again() -> None:
    directory = owning(OWNED)
    report(directory, 1, MINE)
    assert directory.is_ready
    assert directory.holds(MINE) == b"\1" * len(MINE)
    directory.begin_range(6)
    assert not directory.is_ready
    others = [key for key in KEYS if range_of(key) == 6]
    assert directory.is_incomplete(others, bytes(len(others)))
    other_of_mine = next(key for key in map(str, range(1000)) if range_of(key) == OWNED)
    assert not directory.is_incomplete([other_of_mine], b"\0"), "it is missing"
    report(directory, 2, MINE + others)
    assert directory.is_ready
    assert directory.holds(others) == b"\1" * len(others)
    directory.check()


def test_a_range_that_goes_is_forgotten_at_once_and_swept_in_steps() -> None:
    directory = owning(*range(NUM_RANGES))
    report(directory, 1, KEYS)
    while list_keys(directory, "", "", 10).walked_to is not None:
        pass  # an order of all keys is made, and has to go with them
    for number in range(NUM_RANGES):
        if number != OWNED:
            directory.forget_range(number)
            directory.check()
    assert directory.num_keys == len(MINE)
    num_steps = 0
    while directory.sweep(100):
        num_steps += 1
        directory.check()
    assert num_steps >= (len(KEYS) - len(MINE)) // 100
    assert directory.num_chunks("n1") == len(MINE)
    assert directory.holds(MINE) == b"\1" * len(MINE)


def test_what_nodes_had_in_ranges_that_go_is_swept_in_steps_too() -> None:
    """Of 1,250 nodes and 64 ranges that is 80,000 inventories; a node may go, and come back, meanwhile."""
    directory, numbers = owning(*range(NUM_RANGES)), range(NUM_RANGES)
    report(directory, 1, KEYS)
    for number in numbers:
        directory.forget_range(number)
    assert directory.num_chunks("n1") == 0
    in_use = [state for state in directory._inventories.states if state is InventoryState.LIVE]
    assert len(in_use) == NUM_RANGES, "they are given back when no key names them any more"
    for number in numbers[:8]:
        directory.begin_range(number)
    directory.node_gone("n1")
    directory.check()
    directory.node_registered(NODE, 2.0)
    mine = [key for key in KEYS if range_of(key) < 8]
    report(directory, 1, mine)
    while directory.sweep(10):
        directory.check()
    assert directory.holds(mine) == b"\1" * len(mine)
    assert directory.num_chunks("n1") == len(mine)
    assert directory._inventories.states.count(InventoryState.LIVE) == 8
    assert directory._inventories.states.count(InventoryState.GONE) == 0


def test_what_comes_back_begins_with_nothing() -> None:
    directory = owning(OWNED)
    report(directory, 1, MINE)
    directory.forget_range(OWNED)
    directory.begin_range(OWNED)
    assert directory.holds(MINE) == bytes(len(MINE))
    assert directory.is_incomplete(MINE, bytes(len(MINE)))
    assert not announce(directory, added=[ChunkEntry(MINE[0], 9, 100, unconfirmed=True)])[0], "an older one may come"
    report(directory, 2, MINE)
    assert directory.holds(MINE) == b"\1" * len(MINE)
    while directory.sweep(1000):
        pass
    directory.check()


def test_a_report_that_began_before_its_ranges_came_begins_again() -> None:
    """It would never be granted a piece, and its node would wait for that for ever."""
    directory = owning()
    assert not announced(directory, 1).report_wanted
    directory.begin_range(OWNED)
    assert announced(directory, 1).report_wanted
    assert not announced(directory, 2).report_wanted
    directory.forget_range(OWNED)
    directory.begin_range(OWNED)
    assert announced(directory, 2).report_wanted, "the range has come back, and nothing that was told of it counts"
    assert announced(directory, 3).report_keys > 0


def test_a_node_that_lost_the_last_answer_to_its_report_may_tell_the_end_again() -> None:
    directory = owning(OWNED)
    announced(directory, 1)
    piece = ReportPiece(0, NUM_SLOTS, [(key, 7, 100, 0) for key in MINE])
    announced(directory, 1, piece)
    assert directory.is_ready
    again = announced(directory, 1)
    assert again.report_keys > 0
    assert not again.report_wanted
    assert not announced(directory, 1, piece).report_wanted
    assert announced(directory, 0).report_keys == 0
    directory.begin_range(6)
    assert [each.number for each in announced(directory, 1).ranges if each.wanted] == [6]
    directory.check()


@pytest.mark.parametrize("known", [True, False])
def test_time_alone_makes_nothing_known_but_where_etcd_was_set_up_anew(known: bool) -> None:
    master = Master(1, 0.0, shares=True)
    master.update_nodes({}, frozenset({"old"}) if known else None, 0.0)
    master.directory.begin_range(OWNED)
    for now_s in (0.0, REBUILD_S - 0.1):
        master.tick(now_s, 0.05)
        assert not master.directory.is_ready, "a node may hold something that has not come yet"
    master.tick(REBUILD_S, 0.05)
    assert master.directory.is_ready is not known, "only the leader says who has left"
    master.update_nodes({}, frozenset(), REBUILD_S)
    master.tick(REBUILD_S, 0.05)
    assert master.directory.is_ready
    master.check()


def test_a_node_that_announces_its_keys_has_not_left_though_it_has_yet_to_find_the_new_leader() -> None:
    """Else all that it holds would be called missing for as long as it takes to register there."""
    master = Master(1, 0.0, shares=True)
    admitted = frozenset({"n1", "n2"})
    master.update_nodes({"n1": NODE, "n2": instance("n2")}, admitted, 0.0)
    master.begin_leases(40, 10.0)
    master.announce(NodeAnnouncement("n1", NODE.generation), 12.0)
    assert master.present_nodes(admitted, 10.0 + REBUILD_S) == {"n1"}
    assert master.present_nodes(admitted, 12.0 + REBUILD_S) == frozenset()
    master.announce(NodeAnnouncement("n1", NODE.generation), 16.0)
    assert master.present_nodes(admitted, 17.0) == {"n1"}
    lease = master.register(NODE, 3.0, 17.0)
    master.announce(NodeAnnouncement("n1", NODE.generation), 17.5)
    master.deregister("n1", lease)
    assert master.present_nodes(admitted, 17.6) == frozenset(), "its word counts, and so does its good-bye"


def test_a_node_is_in_touch_as_long_as_one_of_its_connections_is() -> None:
    """It has two at a leader that owns keys; one may break, or be given up, while nobody is lost."""
    master = Master(1, 0.0, shares=True)
    master.update_nodes({"n1": NODE}, frozenset({"n1"}), 0.0)
    master.register(NODE, 3.0, 0.0)
    for _ in range(2):
        master.connection_made("n1", 0.0)
    master.connection_lost("n1", 0.1)
    assert master.tick(0.1 + LOST_GRACE_S, 1.0) == []
    master.connection_lost("n1", 1.5)
    assert [each.id for each in master.tick(1.5 + LOST_GRACE_S, 1.0)] == ["n1"]


def test_a_leader_takes_nodes_for_gone_that_do_not_come_within_a_lease() -> None:
    master = Master(1, 0.0, shares=True)
    master.update_nodes({"n1": NODE, "n2": instance("n2")}, frozenset({"n1", "n2"}), 0.0)
    master.begin_leases(40, 10.0)
    lease_id = master.register(NODE, 3.0, 10.5)
    admitted = frozenset({"n1", "n2"})
    assert master.present_nodes(admitted, 10.0 + REBUILD_S - 0.1) == admitted
    assert master.present_nodes(admitted, 10.0 + REBUILD_S) == {"n1"}
    assert [each.id for each in master.tick(13.6, 3.6)] == []
    master.leases.deregister("n1", lease_id)
    assert master.present_nodes(admitted, 14.0) == frozenset()
    assert master.directory.num_nodes == 2, "etcd tells who has gone"
    master.update_nodes({}, frozenset(), 14.0)
    assert master.directory.num_nodes == 0
    master.check()
