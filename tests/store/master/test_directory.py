"""The directory against a naive model of it, and its rules one by one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tanghulu.errors import InvalidRequest, LeaseExpired
from tanghulu.store.master.directory import directory as directory_module
from tanghulu.store.master.directory.chunk_table import DirectoryTable
from tanghulu.store.master.directory.inventories import Inventories, InventoryState
from tanghulu.store.master.directory.key_order import KeyOrder
from tanghulu.store.master.directory.listing import list_keys, snapshot
from tanghulu.store.master.directory.placement import PlacementRequest
from tanghulu.store.master.directory.ranges import RangeDirectories
from tanghulu.store.protocol.announcements import ChunkEntry, NodeAnnouncement, Removal, ReportPiece
from tanghulu.store.protocol.directory_events import DirectoryEventKind
from tanghulu.store.protocol.key_slots import NUM_SLOTS
from tests.store.master.running_master import instance, keys_of_one_range

NAMES = st.sampled_from(["a", "b", "c"])
KEYS = st.sampled_from(["kv/0", "kv/1", "kv/2", "z"])
VERSIONS = st.sampled_from([1, 1, 1, 2])
#: What a node says of a report: nothing, the first piece of another one, the next or the last piece of its own.
STEPS = ("none", "none", "first", "next", "last", "again", "lost")


def size_of(version: int) -> int:
    return 1000 + version


class ModelNode:
    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.before: dict[str, int] = {}
        self.said: dict[str, int] = {}
        self.cold: dict[str, bool] = {}  # as it said last
        self.report_id = 0
        self.number = -1
        self.reported = False

    @property
    def holds(self) -> dict[str, int]:
        return {**self.before, **self.said}

    def drop(self, key: str) -> None:
        self.before.pop(key, None)
        self.said.pop(key, None)


class DirectoryMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.directory = RangeDirectories(0.0, rebuild_s=0.0)
        self.directory.tick(0.0)
        assert self.directory.is_ready
        self.nodes: dict[str, ModelNode] = {}
        self.graves: set[tuple[str, int]] = set()
        self.told: set[tuple[str, str]] = set()
        self.read = 0
        for name in ("a", "b", "c"):
            self.register(name, 1)

    def versions(self, key: str, besides: str = "") -> set[int]:
        return {n.holds[key] for name, n in self.nodes.items() if key in n.holds and name != besides}

    @rule(name=NAMES, generation=st.integers(1, 2))
    def register(self, name: str, generation: int) -> None:
        self.directory.node_registered(instance(name, generation=generation), 0.0)
        if name not in self.nodes or self.nodes[name].generation != generation:
            self.nodes[name] = ModelNode(generation)

    @rule(name=NAMES)
    def lose(self, name: str) -> None:
        self.directory.node_gone(name)
        self.nodes.pop(name, None)

    @rule(
        name=NAMES,
        added=st.lists(st.tuples(KEYS, VERSIONS, st.booleans()), max_size=6),
        removed=st.lists(st.tuples(KEYS, VERSIONS), max_size=2),
        deleted=st.sampled_from([[], [], [], [("kv/0", 1)], [("kv/0", 2)]]),
        step=st.sampled_from(STEPS),
        told=st.lists(st.tuples(KEYS, VERSIONS, st.booleans()), max_size=6, unique_by=lambda each: each[0]),
    )
    def announce(self, name, added, removed, deleted, step, told) -> None:
        node = self.nodes.get(name)
        announcement = NodeAnnouncement(
            name,
            node.generation if node else 1,
            [ChunkEntry(key, version, size_of(version), cold) for key, version, cold in added],
            [Removal(key, version) for key, version in removed],
            [Removal(key, version) for key, version in deleted],
            **self.report(node, step, told),
            capacity_bytes=10_000,
        )
        if node is None:
            with pytest.raises(LeaseExpired):
                self.directory.announce(announcement, 0.0)
            return
        answer = self.directory.announce(announcement, 0.0)
        is_lost = announcement.piece is not None and announcement.piece.number > node.number
        accepted, refused = self.expect(name, node, announcement, is_lost=is_lost)
        assert answer.accepted == accepted
        assert answer.undecided == []
        assert sorted(answer.refused) == refused
        assert answer.report_wanted == (is_lost or (not node.reported and not announcement.report_id))
        assert not (node.reported and answer.report_keys)

    def report(self, node: ModelNode | None, step: str, told: list[tuple[str, int, bool]]) -> dict[str, Any]:
        if node is None or step == "none":
            return {"report_id": node.report_id if node is not None and not node.reported else 0}
        entries = [(key, version, size_of(version), cold) for key, version, cold in told]
        if step == "first" or not node.report_id:
            node.report_id, node.number = node.report_id + 1, 0
            node.before, node.said, node.reported = node.holds, {}, False
        elif step == "lost":  # pieces before it did not arrive
            return {"report_id": node.report_id, "piece": ReportPiece(node.number + 2, NUM_SLOTS, entries)}
        elif step != "again":
            node.number += 1
        next_slot = NUM_SLOTS if step == "last" or node.reported else min(1 + node.number, NUM_SLOTS - 1)
        return {"report_id": node.report_id, "piece": ReportPiece(node.number, next_slot, entries)}

    def expect(
        self, name: str, node: ModelNode, announcement: NodeAnnouncement, *, is_lost: bool
    ) -> tuple[list[bool], list[int]]:
        stale = set()
        for key, version in announcement.deleted:
            self.graves.add((key, version))
            for other_name, other in self.nodes.items():
                if other.holds.get(key) == version:
                    stale |= {(other_name, key, version)} if other_name != name else set()
                    other.drop(key)
        assert set(self.directory.take_stale_holders()) == stale
        for key, version in announcement.removed:
            if node.holds.get(key) == version:
                node.drop(key)
        accepted = [self.enter(name, node, *entry[:2], cold=entry.cold) for entry in announcement.added]
        refused = []
        if announcement.piece is not None and not is_lost:
            entries = announcement.piece.entries
            stands = self.enter_piece(name, node, entries)
            refused = [index for index, each in enumerate(stands) if not each]
            if announcement.piece.next_slot == NUM_SLOTS and not node.reported:
                node.before, node.reported = {}, True
        return accepted, refused

    def enter(self, name: str, node: ModelNode, key: str, version: int, *, cold: bool) -> bool:
        others = self.versions(key, besides=name)
        if self.is_buried(node, key, version):
            return False
        node.drop(key)
        if others <= {version}:
            node.said[key], node.cold[key] = version, cold
        return others <= {version}

    def enter_piece(self, name: str, node: ModelNode, entries: Sequence[tuple[str, int, int, int]]) -> list[bool]:
        buried = [self.is_buried(node, key, version) for key, version, _, _ in entries]
        return [
            not is_buried and self.enter(name, node, key, version, cold=bool(cold))
            for (key, version, _, cold), is_buried in zip(entries, buried, strict=True)
        ]

    def is_buried(self, node: ModelNode, key: str, version: int) -> bool:
        return (key, version) in self.graves and node.holds.get(key) != version

    @rule(key=KEYS)
    def locate_to_remove(self, key: str) -> None:
        (found,) = self.directory.locate_to_remove([key])
        assert ({found.version} if found else set()) == self.versions(key)
        self.graves |= {(key, version) for version in self.versions(key)}

    @rule(name=NAMES)
    def zombie(self, name: str) -> None:
        if name in self.nodes:
            with pytest.raises(InvalidRequest, match="another process took its place"):
                self.directory.announce(NodeAnnouncement(name, 99, [ChunkEntry("k", 1, 1)]), 0.0)

    @rule(num_keys=st.integers(1, 3))
    def sweep(self, num_keys: int) -> None:
        self.directory.sweep(num_keys)

    @rule()
    def settle(self) -> None:
        while self.directory.sweep(2):
            pass
        self.follow()
        assert self.told == self.truth()
        assert self.directory.num_keys == len({key for _, key in self.truth()})

    def truth(self) -> set[tuple[str, str]]:
        return {(name, key) for name, node in self.nodes.items() for key in node.holds}

    def follow(self) -> None:
        for number, event in self.directory.log.read(self.read, 1 << 30):
            assert number == event.sequence == self.read + 1
            self.read = number
            pairs = {(event.node_id, key) for key in event.keys}
            if event.kind is DirectoryEventKind.STORED:
                self.told |= pairs
            elif event.kind is DirectoryEventKind.REMOVED:
                self.told -= pairs
            elif event.kind is DirectoryEventKind.RESET:
                self.told.clear()
            else:
                assert event.kind is DirectoryEventKind.NODE_GONE
                self.told = {pair for pair in self.told if pair[0] != event.node_id}

    @invariant()
    def agrees(self) -> None:
        self.directory.check()
        self.follow()
        assert self.told >= self.truth(), "a follower misses a holder"
        assert all(len(self.versions(key)) <= 1 for _, key in self.truth())
        keys = sorted({key for _, key in self.truth()})
        for key, found in zip([*keys, "none"], self.directory.locate([*keys, "none"]), strict=True):
            assert (set(found.node_ids) if found else set()) == {n for n, k in self.truth() if k == key}
            if found:
                assert all(self.nodes[n].cold[key] for n in found.node_ids[found.num_warm :])
                assert not any(self.nodes[n].cold[key] for n in found.node_ids[: found.num_warm])
                assert {found.version} == self.versions(key)
                assert found.size_bytes == size_of(found.version)
        for view in self.directory.nodes():
            assert self.directory.num_chunks(view.instance.id) == len(self.nodes[view.instance.id].holds)

    @invariant()
    def pages_are_whole(self) -> None:
        for prefix in ("", "kv/", "nothing"):
            wanted = sorted({key for _, key in self.truth() if key.startswith(prefix)})
            after, more, got = "", True, []
            while more:
                listing, more, _ = list_keys(self.directory, prefix, after, 2)
                got += [entry.key for entry in listing]
                after = got[-1] if got else ""
            assert got == wanted
            walk, more = self.directory.walk(), True
            pairs: list[tuple[str, str]] = []
            while more:
                page, more = snapshot(self.directory, walk, prefix, 2)
                pairs += [(name, key) for name, keys in page.items() for key in keys]
            assert sorted(pairs) == sorted(pair for pair in self.truth() if pair[1].startswith(prefix))


DirectoryMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
TestDirectoryMachine = DirectoryMachine.TestCase


@pytest.mark.parametrize("seed", range(12))
def test_a_long_seeded_run(seed: int) -> None:
    """The same machine under plain chance, which reaches combinations that hypothesis finds too rarely."""
    rng = random.Random(seed)
    machine = DirectoryMachine()
    machine.start()
    names, keys = ["a", "b", "c"], ["kv/0", "kv/1", "kv/2", "z"]

    def some(most: int) -> list[tuple[str, int, bool]]:
        drawn = rng.choices(keys, k=rng.randint(0, most))
        return [(key, rng.choice([1, 1, 1, 2]), rng.random() < 0.3) for key in drawn]

    def announce() -> None:
        deleted = [("kv/0", rng.choice([1, 1, 1, 2]))] if rng.random() < 0.05 else []
        removed = [(key, version) for key, version, _ in some(2)]
        machine.announce(rng.choice(names), some(3), removed, deleted, rng.choice(STEPS), some(3))

    actions = [
        (20, announce),
        (3, lambda: machine.sweep(rng.randint(1, 3))),
        (1, machine.settle),
        (1, lambda: machine.lose(rng.choice(names))),
        (2, lambda: machine.register(rng.choice(names), rng.choice([1, 1, 1, 2]))),
    ]
    for _ in range(300):
        rng.choices([action for _, action in actions], [weight for weight, _ in actions])[0]()
        machine.agrees()
    machine.pages_are_whole()
    machine.settle()


def make(*names: str, **values) -> RangeDirectories:
    made = RangeDirectories(0.0, **values)
    for name in names:
        made.node_registered(instance(name), 0.0)
    return made


def say(directory: RangeDirectories, name: str, *added: tuple[str, int], **values) -> list[bool]:
    entries = [ChunkEntry(key, version, 10) for key, version in added]
    accepted = directory.announce(NodeAnnouncement(name, 7, entries, **values), 0.0).accepted
    directory.check()
    return accepted


def gone(*keys: str, version: int = 1) -> list[Removal]:
    return [Removal(key, version) for key in keys]


def holders(directory: RangeDirectories, key: str) -> tuple[str, ...]:
    (found,) = directory.locate([key])
    return found.node_ids if found else ()


def test_the_first_version_wins_while_it_lives() -> None:
    directory = make("a", "b")
    assert say(directory, "a", ("k", 1)) == [True]
    assert say(directory, "b", ("k", 2)) == [False]
    assert say(directory, "b", ("k", 1)) == [True]
    assert holders(directory, "k") == ("a", "b")
    directory.node_gone("a")
    assert say(directory, "b", ("k", 2)) == [True], "its own older version does not stand in a node's way"
    directory.node_gone("b")
    assert holders(directory, "k") == ()


def test_what_is_removed_at_one_holder_is_removed_at_all() -> None:
    directory = make("a", "b", "c")
    for name in ("a", "b"):
        say(directory, name, ("k", 1))
    say(directory, "a", deleted=gone("k"))
    assert holders(directory, "k") == ()
    assert directory.has_stale_holders
    assert directory.take_stale_holders() == [("b", "k", 1)]
    assert not directory.has_stale_holders
    assert say(directory, "b", ("k", 1)) == [False]


def test_what_is_located_to_be_removed_gets_no_more_holders() -> None:
    directory = make("a", "b")
    say(directory, "a", ("k", 1))
    (found,) = directory.locate_to_remove(["k"])
    assert found is not None
    assert found.node_ids == ("a",)
    assert say(directory, "b", ("k", 1)) == [False], "a copy that was under way"
    assert say(directory, "a", ("k", 1)) == [True], "the holder may go on until it is asked to remove it"
    assert holders(directory, "k") == ("a",)
    say(directory, "a", deleted=gone("k"))
    assert say(directory, "b", ("k", 2)) == [True], "a later put"


def test_a_deleted_version_does_not_come_back(monkeypatch) -> None:
    monkeypatch.setattr(directory_module, "MAX_TOMBSTONES", 2)
    directory = make("a", "b")
    first, *more = keys_of_one_range(3)
    say(directory, "a", (first, 1))
    say(directory, "a", deleted=gone(first))
    assert say(directory, "b", (first, 1)) == [False]
    assert say(directory, "b", (first, 2)) == [True]
    for key in more:  # two more graves than there is room for
        say(directory, "a", (key, 1))
        say(directory, "a", deleted=gone(key))
    say(directory, "b", removed=gone(first, version=2))
    assert say(directory, "a", (first, 1)) == [True], "tombstones are bounded"


def test_a_report_replaces_what_was_said_and_forgets_nothing_before_its_end() -> None:
    directory = make("a", rebuild_s=0.0)
    directory.tick(0.0)
    say(directory, "a", report_id=1, piece=ReportPiece(0, NUM_SLOTS))
    directory.tick(0.0)
    assert directory.is_ready
    say(directory, "a", ("old", 1), ("kept", 1))
    answer = directory.announce(NodeAnnouncement("a", 7, report_id=2, piece=ReportPiece(0, 0)), 0.0)
    assert not answer.report_wanted
    assert holders(directory, "old") == ("a",)
    say(directory, "a", report_id=2, piece=ReportPiece(1, 500, [("kept", 1, 10, 0), ("new", 1, 10, 0)]))
    say(directory, "a", ("put meanwhile", 1))
    last = directory.log.last
    say(directory, "a", report_id=2, piece=ReportPiece(2, NUM_SLOTS))
    assert [bool(holders(directory, key)) for key in ("old", "kept", "new", "put meanwhile")] == [
        False,
        True,
        True,
        True,
    ]
    while directory.sweep(1):
        directory.check()
    (event,) = [event for _, event in directory.log.read(last, 100)]
    assert (event.kind, event.keys) == (DirectoryEventKind.REMOVED, ("old",))
    assert directory.num_keys == 3


def test_a_piece_of_a_report_that_is_not_known_proves_nothing() -> None:
    directory = make("a")
    last = ReportPiece(1, 5, NUM_SLOTS)
    answer = directory.announce(NodeAnnouncement("a", 7, [ChunkEntry("k", 1, 1)], piece=last), 0.0)
    assert answer.accepted == [True]
    assert answer.report_wanted
    assert not directory.is_ready


def test_a_report_that_begins_again_counts_from_there() -> None:
    directory = make("a")
    say(directory, "a", report_id=1, piece=ReportPiece(0, 5, [("x", 1, 10, 0)]))
    say(directory, "a", report_id=2, piece=ReportPiece(0, 5, [("y", 1, 10, 0)]))
    say(directory, "a", report_id=2, piece=ReportPiece(1, NUM_SLOTS))
    assert holders(directory, "x") == ()
    assert holders(directory, "y") == ("a",)


def test_losing_a_node_takes_no_time_and_its_inventory_is_used_again() -> None:
    directory = make("a")
    say(directory, "a", *((f"k{n}", 1) for n in range(5000)))
    directory.node_gone("a")
    assert holders(directory, "k1") == ()
    assert directory.num_keys == 5000
    directory.node_registered(instance("b"), 0.0)
    assert directory.sweep(1000)
    assert directory.num_keys == 4000
    say(directory, "b", ("k0", 2))
    while directory.sweep(1000):
        directory.check()
    assert directory.num_keys == 1
    assert holders(directory, "k0") == ("b",)


def test_an_inventory_is_used_again_after_a_whole_sweep() -> None:
    inventories = Inventories()
    table = DirectoryTable(inventories, KeyOrder())
    inventory, empty = inventories.open("a"), inventories.open("a")
    table.add(inventory, "k", 1, 1)
    inventories.kill(empty, InventoryState.REPLACED)
    assert inventories.open("b") == empty, "nothing is to be swept"
    inventories.forget_owner("a")
    assert inventories.begin_sweep()
    assert inventories.open("c") not in (inventory, empty)
    assert list(table.clean("k")) == []
    inventories.end_sweep()
    inventories.check(table.check())
    assert inventories.open("d") == inventory


def test_placement_asks_only_nodes_that_can_hold_it() -> None:
    directory = RangeDirectories(0.0)
    for number, name in enumerate("abc"):
        attributes = {"draining": "true"} if name == "c" else {}
        directory.node_registered(instance(name, attributes=attributes), 0.0)
        directory.announce(NodeAnnouncement(name, 7, capacity_bytes=100 * (number + 1)), 0.0)
    rng = random.Random(1)
    assert [view.instance.id for view in directory.place(PlacementRequest(150), rng)] == ["b"]
    assert {view.instance.id for view in directory.place(PlacementRequest(50), rng)} == {"a", "b"}
    assert directory.place(PlacementRequest(250), rng) == []
