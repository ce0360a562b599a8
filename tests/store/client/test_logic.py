"""The client's logic without any I/O: a scripted cluster answers its effects, in virtual time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tanghulu.errors import (
    ChecksumMismatch,
    ChunkNotFound,
    DirectoryIncomplete,
    LeaseExpired,
    MasterUnavailable,
    NodeUnavailable,
    StoreFull,
    TanghuluError,
)
from tanghulu.rpc.fast_client import Call, Reply
from tanghulu.rpc.wire import Failure
from tanghulu.store.client.logic import operations, query
from tanghulu.store.client.logic.context import Context
from tanghulu.store.client.logic.directory_client import refresh_nodes
from tanghulu.store.client.logic.effects import (
    MASTER,
    CallPeers,
    Deadline,
    Logic,
    Notify,
    OpenSegment,
    PeerId,
    Sleep,
    Transfer,
)
from tanghulu.store.client.logic.get import MAX_PINNED_AGAIN
from tanghulu.store.client.logic.placement import NodeTable
from tanghulu.store.client.model import NodeView, PutItem, PutOptions
from tanghulu.store.protocol import checksums, methods
from tanghulu.store.protocol.directory_messages import NodesReply, PlaceReply
from tanghulu.store.protocol.messages import Done, Found, GetReply, KeysReply, LocateReply, Location, PutReply
from tanghulu.store.protocol.terms import NO_TERM
from tests.virtual.clock import ManualClock

OK = PutOptions()
NAMES = {method.number: method.name for method in methods.METHODS}


def node(name: str, host: str = "elsewhere", capacity: int = 1 << 20) -> NodeView:
    return NodeView(name, "127.0.0.1:1", "", "", "", host, capacity, 0, 0, False, 0.0)


class FakeCluster:
    """Nodes with small values, and a master that may be rebuilding; performs what the logic asks for."""

    def __init__(self, *names: str) -> None:
        self.clock = ManualClock()
        self.values: dict[str, dict[str, bytes]] = {name: {} for name in names}
        self.directory: dict[str, list[str]] = {}
        self.dead: set[str] = set()
        self.full: set[str] = set()
        self.incomplete = False
        self.comes_s = 0.0  # when the nodes register
        self.reported_s = 1e9  # when the master hears what they hold
        self.version = 0  # of the list of nodes
        self.asked: list[str] = []
        self.told_corrupt: list[tuple[str, str]] = []
        self.num_expiring = self.num_moves = self.num_pins = 0  # moves that come too late for their lease
        self.term = NO_TERM  # of the master that the nodes have reported to
        self.context = Context("here", "", self.clock, NodeTable("here"))
        self.context.nodes.update([node(name) for name in names], 1e9)
        self.deadline = Deadline(1.0, self.clock.now_s)

    def run(self, logic: Logic[Any]) -> Any:
        try:
            effect = next(logic)
            while True:
                effect = logic.send(self._perform(effect))
        except StopIteration as end:
            return end.value

    def _perform(self, effect: Any) -> Any:
        if isinstance(effect, Sleep):
            self.clock.advance(effect.seconds)
            return None
        if isinstance(effect, OpenSegment):
            return SimpleNamespace(remote=None, view=None)
        if isinstance(effect, Transfer):
            self.num_moves += 1
            if self.num_moves <= self.num_expiring:
                return [LeaseExpired("over") for _ in effect.requests], None
            for request in effect.requests:
                request.source.view(0, request.length)[:] = b"right"
            return [None for _ in effect.requests], None
        assert isinstance(effect, CallPeers | Notify), effect
        return [self._answer(peer, call) for peer, call in effect.calls]

    def _answer(self, peer: PeerId, call: Call[Any]) -> Reply[Any] | TanghuluError:
        if call.method != methods.UNPIN.number:  # that is told, not asked
            self.asked.append(peer or "master")
        if peer in self.dead or (peer == MASTER and "master" in self.dead):
            return MasterUnavailable("gone") if peer == MASTER else NodeUnavailable("gone")
        return getattr(self, "_method_" + NAMES[call.method])(peer, call)  # type: ignore[no-any-return]

    def _method_locate(self, peer: PeerId, call: Call[Any]) -> Reply[Any]:
        keys = call.request.keys
        if self.clock.now_s() >= self.reported_s:
            self.directory = {key: [name] for name, values in self.values.items() for key in values}
        if call.request.count_only:
            found = bytes(bool(self.directory.get(key)) for key in keys)
            return Reply(LocateReply(self.incomplete, found=found), memoryview(b""))
        located = [Location(0, 0, tuple(self.directory.get(key, ())), 0) for key in keys]
        return Reply(LocateReply(self.incomplete, located), memoryview(b""))

    def _method_nodes(self, peer: PeerId, call: Call[Any]) -> Reply[Any]:
        known = call.request.known_version, call.request.known_generation
        unchanged = bool(self.version) and known == (self.version, 3)
        nodes = self._views() if not unchanged and (self.comes_s or self.version) else []
        return Reply(NodesReply(nodes, self.incomplete, 0, 3, self.version, unchanged), memoryview(b""))

    def _views(self) -> list[NodeView]:
        names = self.values if self.clock.now_s() >= self.comes_s else ()
        return [NodeView(name, "", "", "", "", "") for name in names]

    def _method_place(self, peer: PeerId, call: Call[Any]) -> Reply[Any]:
        return Reply(PlaceReply(self._views()), memoryview(b""))

    def _method_get(self, peer: PeerId, call: Call[Any]) -> Reply[Any]:
        items: list[Found | Failure] = []
        data = b""
        for key in call.request.keys:
            value = self.values[peer].get(key)
            if value is None:
                items.append(Failure.of(ChunkNotFound(key)))
                continue
            if self.num_expiring:
                self.num_pins += 1
            else:
                data += value
            items.append(Found(len(value), 0, checksums.compute(b"right"), self.num_pins, 0, False))
        return Reply(GetReply(items, 1000, self.term), memoryview(data))

    def _method_unpin(self, peer: PeerId, call: Call[Any]) -> Reply[Any]:
        self.told_corrupt += [(peer, key) for key in call.request.corrupt]
        return Reply(Done(), memoryview(b""))

    def _method_put(self, peer: PeerId, call: Call[Any]) -> Reply[Any]:
        outcomes: list[bool | TanghuluError] = []
        for item, value in zip(call.request.items, call.attachment, strict=True):
            if peer in self.full:
                outcomes.append(StoreFull("full"))
            else:
                self.values[peer][item.key] = bytes(value)
                outcomes.append(False)
        return Reply(PutReply.of(outcomes, self.term), memoryview(b""))

    def _method_remove(self, peer: PeerId, call: Call[Any]) -> Reply[Any]:
        removed = bytes(self.values[peer].pop(key, None) is not None for key in call.request.keys)
        return Reply(KeysReply(removed), memoryview(b""))

    def _method_exists(self, peer: PeerId, call: Call[Any]) -> Reply[Any]:
        found = bytes(key in self.values[peer] for key in call.request.keys)
        return Reply(KeysReply(found), memoryview(b""))


@pytest.fixture
def fake() -> FakeCluster:
    return FakeCluster("a", "b")


def get(fake: FakeCluster, key: str = "k") -> bytes:
    return bytes(fake.run(operations.get(fake.context, fake.deadline, key)).bytes())


def test_a_stale_location_costs_one_question_to_the_master(fake: FakeCluster) -> None:
    fake.context.locations.set("k", (PeerId("a"),))
    fake.values["b"]["k"] = b"right"
    fake.directory["k"] = ["b"]
    assert get(fake) == b"right"
    assert fake.asked == ["a", "master", "b"]
    assert fake.context.locations.get("k") == ("b",)


def test_a_holder_that_the_master_lists_no_more_is_not_asked_by_heart(fake: FakeCluster) -> None:
    """It was cut off, and has not heard of what was removed since; the list of nodes may come with any other call."""
    fake.context.locations.set("k", (PeerId("a"),))
    fake.values["a"]["k"] = b"removed"
    fake.context.nodes.update([node("b")], 1e9)
    with pytest.raises(ChunkNotFound):
        get(fake)
    fake.values["b"]["k"] = b"right"
    fake.directory["k"] = ["b"]
    assert get(fake) == b"right"
    assert "a" not in fake.asked


def test_a_dead_holder_and_a_corrupt_replica_are_passed_over(fake: FakeCluster) -> None:
    fake.values["c"] = {"k": b"wrong"}
    fake.values["b"]["k"] = b"right"
    fake.context.nodes.learn([node("c")])
    fake.directory["k"] = ["a", "c", "b"]
    fake.dead.add("a")
    assert get(fake) == b"right"
    fake.values["b"].clear()
    fake.dead.discard("a")
    with pytest.raises(ChecksumMismatch):  # whatever the order: the others only said that they have not got it
        get(fake)
    assert set(fake.told_corrupt) == {("c", "k")}


def test_the_error_says_what_stood_in_the_way(fake: FakeCluster) -> None:
    with pytest.raises(ChunkNotFound):
        get(fake)
    fake.directory["k"] = ["a"]
    with pytest.raises(ChunkNotFound):
        get(fake)
    fake.dead.add("a")
    with pytest.raises(NodeUnavailable):
        get(fake)
    fake.dead.add("master")
    with pytest.raises(MasterUnavailable):
        get(fake)
    fake.context.locations.set("k", (PeerId("b"),))
    fake.values["b"]["k"] = b"right"
    assert get(fake) == b"right", "known locations go on without a master"


def test_a_lease_that_ends_before_the_bytes_have_come_is_taken_again_a_few_times(fake: FakeCluster) -> None:
    fake.values["a"]["k"] = b"right"
    fake.directory["k"] = ["a"]
    fake.num_expiring = MAX_PINNED_AGAIN
    assert get(fake) == b"right"
    assert fake.num_pins == fake.num_moves == MAX_PINNED_AGAIN + 1
    fake.num_moves, fake.num_expiring = 0, MAX_PINNED_AGAIN + 1
    with pytest.raises(LeaseExpired):
        get(fake)


def test_while_the_master_rebuilds_it_alone_is_asked_and_nothing_is_denied(fake: FakeCluster) -> None:
    fake.incomplete = True
    fake.values["b"]["k"] = b"right"
    fake.reported_s = 0.3
    assert get(fake) == b"right"
    assert fake.asked.count("b") == 1
    assert set(fake.asked) == {"master", "b"}, "no node is asked before the master names it"
    fake.asked.clear()
    fake.reported_s = 0.9
    assert fake.run(query.exists(fake.context, fake.deadline, ["k"])) == [True]
    assert set(fake.asked) == {"master"}
    fake.clock = ManualClock()
    fake.deadline = Deadline(1.0, fake.clock.now_s)
    with pytest.raises(DirectoryIncomplete):
        fake.run(query.exists(fake.context, fake.deadline, ["absent"]))
    fake.clock = ManualClock()
    fake.deadline = Deadline(1.0, fake.clock.now_s)
    with pytest.raises(DirectoryIncomplete):
        get(fake, "absent")
    assert 0.2 <= fake.clock.now_s() <= 1.0
    assert fake.asked.count("master") < 40, "the pauses grow"


def test_a_list_of_nodes_that_has_not_changed_is_not_sent(fake: FakeCluster) -> None:
    fake.version = 2
    nodes = fake.context.nodes = NodeTable("here")
    for _ in range(3):
        assert not nodes.is_fresh(fake.clock.now_s())
        fake.run(refresh_nodes(fake.context))
        assert nodes.ids() == list(fake.values)
        assert nodes.version == (2, 3)
        fake.clock.advance(0.99)
        assert nodes.is_fresh(fake.clock.now_s()), "not more often than once a second"
        fake.clock.advance(1.1)
    del fake.values["a"]
    fake.version = 3
    fake.run(refresh_nodes(fake.context))
    assert nodes.ids() == list(fake.values), "a node that is gone is forgotten"


def test_clients_that_began_together_do_not_ask_together_for_ever() -> None:
    tables = [NodeTable("here") for _ in range(200)]
    for table in tables:
        table.update([], 0.0)
    num_fresh = [sum(table.is_fresh(1.0 + tenth / 10) for table in tables) for tenth in range(11)]
    assert num_fresh[0] == 200
    assert num_fresh[10] == 0
    assert all(0 < fresh < 200 for fresh in num_fresh[2:9])


def test_a_put_waits_for_the_first_node_that_comes_to_a_new_master(fake: FakeCluster) -> None:
    fake.context.nodes = NodeTable("here")
    fake.incomplete, fake.comes_s, fake.deadline = True, 5.0, Deadline(8.0, fake.clock.now_s)
    assert fake.run(operations.put(fake.context, fake.deadline, PutItem("k", b"right"), OK)).num_replicas == 1
    assert 5.0 <= fake.clock.now_s() < 5.5
    fake.context.nodes, fake.comes_s = NodeTable("here"), 9.0
    with pytest.raises(NodeUnavailable):
        fake.run(operations.put(fake.context, fake.deadline, PutItem("l", b"right"), OK))
    assert 7.5 <= fake.clock.now_s() <= 8.0


def test_a_full_or_dead_node_sends_a_put_elsewhere(fake: FakeCluster) -> None:
    fake.full.add("a")
    assert fake.run(operations.put(fake.context, fake.deadline, PutItem("k", b"right"), OK)).num_replicas == 1
    assert fake.values["b"] == {"k": b"right"}
    fake.dead.add("b")
    with pytest.raises((StoreFull, NodeUnavailable)):
        fake.run(operations.put(fake.context, fake.deadline, PutItem("l", b"right"), OK))


def test_replicas_go_to_different_nodes_and_fewer_are_told(fake: FakeCluster) -> None:
    two = PutOptions(replicas=2)
    assert fake.run(operations.put(fake.context, fake.deadline, PutItem("k", b"right"), two)).num_replicas == 2
    fake.dead.add("b")
    assert fake.run(operations.put(fake.context, fake.deadline, PutItem("l", b"right"), two)).num_replicas == 1


def test_local_nodes_share_the_keys_and_keep_them() -> None:
    table = NodeTable("here")
    names = [f"n{i}" for i in range(4)]
    table.update([node(name, "here") for name in names] + [node("far")], 0.0)
    keys = [f"key{i}" for i in range(4000)]
    first = {key: table.local_for(key, 1)[0] for key in keys}
    for name in names:
        assert 800 < list(first.values()).count(PeerId(name)) < 1200
    table.update([node(name, "here") for name in names[:3]], 0.0)
    moved = [key for key in keys if table.local_for(key, 1)[0] != first[key]]
    assert all(first[key] == "n3" for key in moved), "a node that leaves moves only its own keys"
    assert table.local_for("k", 2 << 20) == [], "too large for each"


class LeavingCluster(FakeCluster):
    """Node a has been drained, and is gone when a client calls it; the master hears of that at ``left_s``."""

    left_s = 0.0

    def _method_locate(self, peer: PeerId, call: Call[Any]) -> Reply[Any]:
        is_known = "a" in self.dead and self.clock.now_s() >= self.left_s
        self.directory = {
            key: [name for name in names if not (name == "a" and is_known)] for key, names in self.directory.items()
        }
        self.dead.add("a")
        return super()._method_locate(peer, call)


@pytest.fixture
def leaving() -> LeavingCluster:
    fake = LeavingCluster("a", "b")
    fake.directory = {"moved": ["a"], "both": ["a", "b"], "here": ["b"], "only": ["a"], "none": []}
    fake.values["b"] = {"both": b"", "here": b""}
    fake.deadline = Deadline(30.0, fake.clock.now_s)
    return fake


@pytest.mark.parametrize("left_s", [0.0, 1.0])
def test_what_a_node_held_that_leaves_is_removed_where_it_is_now(leaving: LeavingCluster, left_s: float) -> None:
    leaving.left_s = left_s
    leaving.values["b"]["moved"] = b""
    leaving.directory["moved"].append("b")  # the drain has copied it
    keys = list(leaving.directory)
    assert leaving.run(query.remove(leaving.context, leaving.deadline, keys)) == [True, True, True, False, False]
    assert leaving.values["b"] == {}
    assert leaving.run(query.remove(leaving.context, leaving.deadline, ["only"], True)) == [False]


def test_a_copy_of_which_the_master_hears_late_is_removed_too(leaving: LeavingCluster) -> None:
    leaving.values["b"]["moved"] = b""
    leaving.reported_s = 0.01  # the second look-up finds it
    assert leaving.run(query.remove(leaving.context, leaving.deadline, ["moved"], True)) == [True]
    assert leaving.values["b"].keys() == {"both", "here"}


def test_a_holder_that_stays_away_is_told(leaving: LeavingCluster) -> None:
    leaving.left_s = 1e9
    keys = list(leaving.directory)
    moved, both, here, only, none = leaving.run(query.remove(leaving.context, leaving.deadline, keys))
    assert (here, none) == (True, False)
    assert all(isinstance(each, NodeUnavailable) for each in (moved, both, only))
    with pytest.raises(NodeUnavailable):
        leaving.run(query.remove(leaving.context, leaving.deadline, ["only"], True))
