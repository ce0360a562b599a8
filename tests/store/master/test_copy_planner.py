"""The copy planner's decisions, in virtual time: announcements in, orders out, windows and rates kept."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from tanghulu.discovery.base import Instance
from tanghulu.errors import InvalidRequest
from tanghulu.store.master.directory.ranges import RangeDirectories
from tanghulu.store.master.replication import planner as copy_planner
from tanghulu.store.master.replication.demand import (
    MAX_HOT_KEYS,
    MAX_REQUESTED_KEYS,
    TAU_S,
    HotKeyRates,
    ReplicaRequests,
)
from tanghulu.store.master.replication.orders import Copy, Reason
from tanghulu.store.master.replication.planner import FAILED_PAUSE_S, GRACE_S, REMOVAL_S, CopyPlanner
from tanghulu.store.protocol.announcements import ChunkEntry, DropOrder, NodeAnnouncement, Removal, ReportPiece
from tanghulu.store.protocol.key_slots import NUM_SLOTS, range_of, slot_of
from tanghulu.types import Address, InstanceId, Place, Role

SIZE = 1000
CAPACITY = 1_000_000


class World:
    """A directory, a planner, and nodes that obey at once."""

    def __init__(self, *nodes: str, rate: float = 1e9) -> None:
        self.now_s = 0.0
        self.directory = RangeDirectories(0.0, rebuild_s=0.0)
        self.planner = CopyPlanner(self.directory, rate, Random(1), 0.0)
        self.chunks: dict[str, set[str]] = {}
        self.used: dict[str, int] = {}
        self.copies: list[Copy] = []
        self.drops: list[tuple[str, DropOrder]] = []
        self.rng = Random(2)
        self.failing = 0.0  # how often a node cannot make its copies
        for name in nodes:
            self.join(name)
        self.directory.tick(0.0)

    def instance(self, name: str, *, draining: bool = False) -> Instance:
        attributes = {"draining": "true"} if draining else {}
        place = Place("z", f"rack-{name}", name)
        return Instance(InstanceId(name), Role.NODE, Address("h", 1), place=place, generation=1, attributes=attributes)

    def join(self, name: str) -> None:
        self.directory.node_registered(self.instance(name), self.now_s)
        self.chunks[name] = set()
        self.say(name, piece=ReportPiece(0, NUM_SLOTS))

    def die(self, name: str) -> None:
        self.directory.node_gone(name)
        del self.chunks[name]

    def drain(self, name: str, *, draining: bool = True) -> None:
        self.directory.node_registered(self.instance(name, draining=draining), self.now_s)

    def put(self, *names: str, num: int = 1, replicas: int = 1, prefix: str = "k") -> None:
        keys = [f"{prefix}{index:04}" for index in range(num)]
        for name in names:
            self.say(name, added=keys, replicas=replicas)

    def say(
        self,
        name: str,
        added: list[str] | None = None,
        removed: list[str] | None = None,
        replicas: int = 1,
        piece: ReportPiece | None = None,
        hot: list[tuple[str, int]] | None = None,
        failed: list[str] | None = None,
        cold: bool = False,
    ) -> None:
        added, removed = added or [], removed or []
        self.chunks[name] |= set(added)
        self.chunks[name] -= set(removed)
        announcement = NodeAnnouncement(
            name,
            1,
            [ChunkEntry(key, 7, SIZE, cold) for key in added],
            [Removal(key, 7) for key in removed],
            report_id=1 if piece is not None else 0,
            piece=piece,
            capacity_bytes=CAPACITY,
            used_bytes=self.used.get(name, len(self.chunks[name]) * SIZE),
            replicated=[(key, replicas) for key in added if replicas > 1],
            quiet=not added and not removed,
            hot=hot or [],
            failed_copies=failed or [],
        )
        self.directory.announce(announcement, self.now_s)
        copies, drops = self.planner.orders_for(announcement, self.now_s)
        self.copies += copies
        self.drops += [(name, drop) for drop in drops]
        if copies and self.rng.random() < self.failing:
            self.say(name, failed=[copy.key for copy in copies])
        elif copies:
            self.say(name, added=[copy.key for copy in copies if copy.source in self.chunks])
        if drops:
            self.say(name, removed=[drop.key for drop in drops])

    def run(self, seconds: float, *, num_keys: int = 1000) -> None:
        for _ in range(round(seconds * 10)):
            self.now_s += 0.1
            self.planner.walk(self.now_s, num_keys)
            for name in sorted(self.chunks):
                self.say(name)
            self.planner.check()

    def holders(self, key: str) -> set[str]:
        return {name for name, keys in self.chunks.items() if key in keys}


def test_a_lost_replica_is_restored_after_its_grace_on_another_node() -> None:
    world = World("a", "b", "c")
    world.put("a", "b", num=50, replicas=2)
    world.put("a", num=50, prefix="single")
    world.run(5.0)
    assert not world.copies, "nothing is missing"
    world.die("b")
    world.run(GRACE_S - 0.5)
    assert not world.copies, "it may come back"
    world.run(3.0)
    assert all(world.holders(f"k{i:04}") == {"a", "c"} for i in range(50))
    assert {copy.reason for copy in world.copies} == {Reason.RESTORE}
    assert len(world.copies) == 50, "each once"


def test_a_copy_is_pulled_from_who_has_it_in_memory() -> None:
    world = World("a", "b", "c", "d")
    world.put("a", "b", "c", num=20, replicas=3)
    world.say("a", added=[f"k{i:04}" for i in range(20)], cold=True)
    world.die("c")
    world.run(GRACE_S + 3.0)
    assert {(copy.source, copy.target) for copy in world.copies} == {("b", "d")}


def test_a_replica_that_was_evicted_is_not_restored() -> None:
    world = World("a", "b", "c")
    world.put("a", "b", num=3, replicas=2)
    world.say("b", removed=["k0001"])
    world.run(2 * GRACE_S)
    assert not world.copies


def test_with_too_few_nodes_what_is_wanted_is_not_waited_for() -> None:
    world = World("a", "b")
    world.put("a", "b", num=3, replicas=3)
    world.run(2 * GRACE_S)
    assert not world.copies
    world.join("c")
    world.run(2 * GRACE_S)
    assert world.holders("k0000") == {"a", "b", "c"}


def test_draining_moves_all_chunks_and_says_when_it_is_safe() -> None:
    world = World("a", "b", "c")
    world.put("a", num=300)
    world.put("a", "b", num=100, prefix="twice")
    world.drain("a")
    world.planner.walk(world.now_s, 10)
    assert world.planner.progress("a") == (400, False)
    world.run(5.0, num_keys=50)
    assert world.planner.progress("a") == (0, True)
    assert all(world.holders(f"k{i:04}") & {"b", "c"} for i in range(300))
    moved = Counter(copy.target for copy in world.copies)
    assert set(moved) == {"b", "c"}
    assert len(world.copies) == 300, "what another node holds is not copied"
    world.drain("a", draining=False)
    world.run(0.5)
    assert not world.planner.progress("a").drained


def test_a_node_that_is_still_written_to_is_not_drained() -> None:
    world = World("a", "b")
    world.put("a", num=3)
    world.drain("a")
    for index in range(20):
        world.say("a", added=[f"late{index}"])
        world.now_s += 0.1
        world.planner.walk(world.now_s, 1000)
        world.say("b")
        assert not world.planner.progress("a").drained
    world.run(1.0)
    assert world.planner.progress("a").drained
    assert world.chunks["b"] == world.chunks["a"]


def test_a_range_that_comes_is_walked_over_before_a_node_is_drained() -> None:
    """Its last owner had not copied the key "late" yet."""
    world = World("a", "b")
    world.put("a", num=50)
    world.drain("a")
    world.run(5.0)
    assert world.planner.progress("a") == (0, True)
    world.directory.forget_range(range_of("late"))
    world.directory.begin_range(range_of("late"))
    assert not world.planner.progress("a").drained
    world.chunks["a"].add("late")
    for name, keys in world.chunks.items():
        piece = ReportPiece(0, NUM_SLOTS, [(key, 7, SIZE, 0) for key in sorted(keys, key=slot_of)])
        world.directory.announce(NodeAnnouncement(name, 1, report_id=2, piece=piece), world.now_s)
    assert world.directory.is_ready
    assert not world.planner.progress("a").drained
    world.run(5.0)
    assert world.planner.progress("a") == (0, True)
    assert world.holders("late") == {"a", "b"}


def test_the_last_node_cannot_be_drained() -> None:
    world = World("a")
    world.put("a", num=3)
    world.drain("a")
    world.run(3.0)
    assert world.planner.progress("a") == (3, False)


def test_a_drained_replica_is_replaced_too() -> None:
    world = World("a", "b", "c")
    world.put("a", "b", num=10, replicas=2)
    world.drain("a")
    world.run(2.0)
    assert all({"b", "c"} <= world.holders(f"k{i:04}") for i in range(10))


def test_a_node_that_joins_empty_is_filled_from_the_fullest_up_to_their_mean() -> None:
    world = World("a", "b")
    world.put("a", num=800, prefix="a")
    world.put("b", num=600, prefix="b")
    world.run(1.0)
    assert not world.copies
    world.join("c")
    world.run(30.0)
    sizes = {name: len(keys) for name, keys in world.chunks.items()}
    assert sum(sizes.values()) == 1400, "moved, not copied"
    assert 400 <= sizes["c"] <= 520, sizes
    num_copies = len(world.copies)
    world.run(10.0)
    assert len(world.copies) == num_copies, "and then it rests"


def test_half_empty_nodes_are_left_alone() -> None:
    world = World("a", "b")
    world.put("a", num=400, prefix="a")
    world.join("c")
    world.run(10.0)
    assert not world.copies


def test_a_hot_chunk_gets_holders_and_loses_them_when_it_cools() -> None:
    world = World("a", "b", "c", "d", "e", "f")
    world.put("a", num=3)
    for _ in range(20):
        world.say("a", hot=[("k0001", 1000), ("k0002", 20)])
        world.run(1.0)
    assert len(world.holders("k0001")) == copy_planner.MAX_HOT_HOLDERS
    assert len(world.holders("k0002")) == 1
    world.run(60.0)
    assert world.holders("k0001") == {"a"}, "the first holder keeps it"
    assert all(drop.key == "k0001" for _, drop in world.drops)


def test_what_is_asked_for_is_copied_ahead_and_goes_when_nobody_asks_any_more() -> None:
    world = World("a", "b", "c")
    world.put("a", num=200)
    keys = [f"k{i:04}" for i in range(100)]
    assert world.planner.ask([*keys, "unknown"], 2, 20.0, world.now_s) == 100
    world.run(10.0)
    assert {len(world.holders(key)) for key in keys} == {2}
    assert len(world.holders("k0150")) == 1, "nobody asked for it"
    assert {copy.reason for copy in world.copies} == {Reason.HOT}
    world.planner.ask(keys[:50], 3, 60.0, world.now_s)
    world.run(30.0)
    assert {len(world.holders(key)) for key in keys[:50]} == {3}, "asked again, for more"
    assert {len(world.holders(key)) for key in keys[50:]} == {1}
    world.run(120.0)
    assert {frozenset(world.holders(key)) for key in keys} == {frozenset("a")}


def test_what_is_asked_for_is_bounded() -> None:
    world = World("a", "b")
    world.put("a", num=10)
    with pytest.raises(InvalidRequest, match="holders=0"):
        world.planner.ask(["k0001"], 0, 1.0, world.now_s)
    with pytest.raises(InvalidRequest, match="at most 3600 s"):
        world.planner.ask(["k0001"], 2, 1e9, world.now_s)
    requests = ReplicaRequests()
    assert requests.ask(map(str, range(MAX_REQUESTED_KEYS + 10)), 2, 1.0, 0.0) == MAX_REQUESTED_KEYS
    assert requests.keys(2.0) == []
    requests.check()


def test_a_tenant_has_a_share_of_the_requests() -> None:
    requests, share = ReplicaRequests(), MAX_REQUESTED_KEYS // 4
    many = [f"@acme/{number}" for number in range(share + 10)]
    assert requests.ask(many, 2, 1.0, 0.0) == share
    assert requests.ask(many, 2, 5.0, 0.0) == share, "those that it has are renewed"
    assert requests.ask(["@other/a", "b"], 2, 1.0, 0.0) == 2
    requests.check()
    assert len(requests.keys(2.0)) == share
    assert requests.keys(6.0) == []
    assert requests.ask(many, 2, 1.0, 6.0) == share, "its share comes back"
    requests.check()


def test_hot_keys_settle_at_the_rate_and_decays() -> None:
    hot_keys = HotKeyRates()
    now_s = 0.0
    for _ in range(60):
        now_s += 1.0
        hot_keys.add([("k", 500)], now_s)
    assert 450 < hot_keys.rate("k", now_s) < 600
    assert hot_keys.rate("k", now_s + TAU_S) == pytest.approx(hot_keys.rate("k", now_s) / 2.718, rel=0.01)
    hot_keys.add([(f"x{i}", 1) for i in range(2 * MAX_HOT_KEYS)], now_s)
    hot_keys.check()
    assert hot_keys.keys(now_s)[0] == "k", "many cold keys do not push a hot one out"


def test_copies_that_fail_are_tried_again_after_a_pause() -> None:
    world = World("a", "b")
    world.put("a", num=3)
    world.failing = 1.0
    world.drain("a")
    world.run(10.0)
    assert world.planner.progress("a") == (3, False)
    assert 9 <= len(world.copies) <= 18, "not again and again"
    world.failing = 0.0
    world.run(5.0)
    assert world.planner.progress("a") == (0, True)


def test_keys_that_are_gone_leave_room_for_those_that_lack_a_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_planner, "MAX_LACKING", 4)
    world = World("a", "b", "c", "d")
    world.put("a", "b", num=4, replicas=2, prefix="gone")
    world.die("b")
    world.run(GRACE_S / 2)
    world.say("a", removed=[f"gone{i:04}" for i in range(4)])
    world.put("a", "c", num=4, replicas=2)
    world.die("c")
    world.run(GRACE_S + 2.0)
    assert all(world.holders(f"k{i:04}") == {"a", "d"} for i in range(4))


def test_failed_copies_of_keys_that_are_gone_leave_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_planner, "MAX_FAILED", 3)
    world = World("a", "b")
    world.put("a", num=3)
    world.drain("a")
    world.planner.walk(world.now_s, 10)
    world.say("b", failed=[f"gone{i}" for i in range(3)])
    world.run(FAILED_PAUSE_S + 1.0)
    world.copies.clear()
    world.put("a", num=3, prefix="new")
    world.failing = 1.0
    world.run(10.0)
    assert 9 <= len(world.copies) <= 18, "not again and again"


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_drained_means_safe_and_replicas_come_back(seed: int) -> None:
    """Nodes join, die, drain, evict and fail in any order; drained nodes are stopped at once, and nothing is lost."""
    rng = Random(seed)
    world = World("n0", "n1", "n2", "n3")
    world.failing = 0.1
    safe: set[str] = set()  # keys that must not be lost: of nodes that end only when they are drained
    names = 4
    for step in range(60):
        alive = sorted(world.chunks)
        name = rng.choice(alive)
        match rng.randrange(6):
            case 0 if len(alive) < 7:
                world.join(f"n{names}")
                names += 1
            case 1 if len(alive) > 3 and len(world.planner._drains) < len(alive) - 2:
                world.drain(name)
            case 2 | 3 if name not in world.planner._drains:
                world.put(name, num=20, prefix=f"s{step}-")
                safe |= {f"s{step}-{i:04}" for i in range(20)}
            case 4 if len(alive) > 1 and not world.planner._drains.keys() & set(alive[:2]):
                world.put(*alive[:2], num=10, replicas=2, prefix=f"r{step}-")
                safe |= {f"r{step}-{i:04}" for i in range(10)}
        world.run(rng.choice([0.3, 1.0, 3.0]), num_keys=rng.choice([7, 100, 1000]))
        for node in list(world.planner._drains):
            if world.planner.progress(node).drained:
                world.die(node)
                assert all(world.holders(key) for key in safe), f"seed {seed}, step {step}: {node} was not safe to stop"
    world.failing = 0.0
    world.run(20.0)
    takers = len(world.chunks) - len(world.planner._drains)
    for key in safe:
        wanted = min(2 if key.startswith("r") else 1, takers)
        assert len(world.holders(key) - world.planner._drains.keys()) >= wanted, f"seed {seed}: {key}"
    world.directory.check()


def test_a_node_that_is_told_to_drop_what_it_removes_itself_is_not_waited_for() -> None:
    world = World("a", "b")
    world.put("a", "b")

    def heard(name: str, *deleted: str) -> list[DropOrder]:
        announcement = NodeAnnouncement(name, 1, deleted=[Removal(key, 7) for key in deleted])
        world.directory.announce(announcement, world.now_s)
        return world.planner.orders_for(announcement, world.now_s)[1]

    assert heard("a", "k0000") == []
    assert heard("b") == [DropOrder("k0000", 7, removed=True)], "it was removed at a"
    assert world.planner.orders.active
    assert heard("b", "k0000") == []
    assert not world.planner.orders.active


def test_a_copy_that_the_master_refused_is_not_made() -> None:
    world = World("a", "b")
    world.put("a", num=700)
    world.planner.walk(0.1, 1000)
    copies, _ = world.planner.orders.take("b", 0.1)
    assert copies[0].reason is Reason.FILL
    for version, stands in ((8, False), (7, True)):
        entry = ChunkEntry(copies[0].key, version, SIZE)
        announcement = NodeAnnouncement("b", 1, [entry], capacity_bytes=CAPACITY)
        assert world.directory.announce(announcement, 0.1).accepted == [stands]
        world.planner.orders_for(announcement, 0.1)
        _, drops = world.planner.orders.take("a", 0.1)
        assert drops == ([DropOrder(copies[0].key, 7)] if stands else []), "b put another value of the key"


def test_what_a_client_began_to_remove_holds_up_no_drain() -> None:
    world = World("a", "b")
    world.put("a", num=3)
    world.directory.locate_to_remove(["k0001"])  # and its client is gone
    world.say("b")
    world.drain("a")
    world.run(REMOVAL_S - 1)
    assert not world.drops
    world.run(5.0)
    assert world.drops == [("a", DropOrder("k0001", 7, removed=True))]
    assert world.planner.progress("a").drained
    assert sorted(world.chunks["b"]) == ["k0000", "k0002"]
