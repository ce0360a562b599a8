"""NODES by version: what changes the version, and that an unchanged list is not sent again."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from prometheus_client import CollectorRegistry

from tanghulu.rpc.wire import parser_of
from tanghulu.store.master.core import Master
from tanghulu.store.master.metrics import MasterMetrics
from tanghulu.store.master.replication.planner import Progress
from tanghulu.store.master.rpc.node_list import NodeList
from tanghulu.store.master.server import MasterServer
from tanghulu.store.protocol.announcements import NodeAnnouncement
from tanghulu.store.protocol.directory_messages import NodesReply, NodesRequest
from tanghulu.store.protocol.key_slots import NUM_RANGES
from tests.store.master.running_master import FixedOwnership, instance
from tests.virtual.clock import ManualClock


def answer(nodes: NodeList, request: NodesRequest) -> NodesReply:
    reply = nodes.answer(request)
    return parser_of(NodesReply)(reply) if isinstance(reply, bytes) else reply


class Asking:
    """A master, and one client that asks it by the version that it has."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.master = Master(5, self.clock.now_s(), rng=Random(1))
        self.nodes = NodeList(MasterServer(self.master, self.clock, MasterMetrics(CollectorRegistry()), Random(1)))
        self.known = NodesRequest(versioned=True)

    def announce(self, used: int, capacity: int = 1000) -> None:
        self.master.announce(NodeAnnouncement("n1", 7, capacity_bytes=capacity, used_bytes=used), self.clock.now_s())

    def ask(self) -> list[str] | None:
        """The nodes' ids; None: unchanged."""
        reply = answer(self.nodes, self.known)
        self.known = NodesRequest(reply.version, reply.master_generation, versioned=True)
        assert not (reply.unchanged and reply.nodes)
        return None if reply.unchanged else [node.id for node in reply.nodes]

    def figures(self) -> list[int]:
        return [node.used_bytes for node in answer(self.nodes, NodesRequest()).nodes]


@pytest.fixture
def asking() -> Asking:
    asking = Asking()
    asking.master.register(instance("n1"), 60.0, 0.0)
    assert asking.ask() == ["n1"]
    assert asking.ask() is None
    return asking


def test_a_node_that_comes_goes_or_changes_makes_another_version(asking: Asking) -> None:
    asking.master.register(instance("n2"), 60.0, 0.0)
    assert asking.ask() == ["n1", "n2"]
    asking.master.register(instance("n2", attributes={"draining": "true"}), 60.0, 0.0)
    assert asking.ask() == ["n1", "n2"]
    lease_id = asking.master.register(instance("n2", attributes={"draining": "true"}), 60.0, 0.0)
    assert asking.ask() is None
    asking.master.deregister("n2", lease_id)
    assert asking.ask() == ["n1"]


def test_capacity_makes_another_version_and_use_does_not(asking: Asking) -> None:
    asking.announce(used=1)
    assert asking.ask() == ["n1"]
    asking.announce(used=2)
    assert asking.ask() is None
    assert asking.figures() == [2], "who asks without a version hears what is now"
    asking.announce(used=2, capacity=2000)
    assert asking.ask() == ["n1"]


def test_a_complete_directory_makes_another_version(asking: Asking) -> None:
    asking.clock.advance(10.0)
    for _ in range(3):
        asking.master.tick(asking.clock.now_s(), 10.0)
    was_ready = asking.master.directory.is_ready
    assert (asking.ask() is not None) == was_ready


def test_versions_of_another_generation_are_other_versions(asking: Asking) -> None:
    asking.master.begin_leases(6, asking.clock.now_s())
    asking.master.register(instance("n1"), 60.0, 0.0)
    assert asking.ask() == ["n1"]
    assert asking.ask() is None


@pytest.mark.parametrize("num_owned", [NUM_RANGES, NUM_RANGES - 1])
def test_one_of_several_owners_tells_the_term_of_now_and_of_no_drain_that_is_over(
    num_owned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has heard of the later map would refuse the list for ever."""
    ownership, clock = FixedOwnership(), ManualClock()
    ownership.owned = frozenset(range(num_owned))
    master = Master(5, clock.now_s(), rng=Random(1))
    master.register(instance("n1", attributes={"draining": "true"}), 60.0, 0.0)
    monkeypatch.setattr(master.copies, "progress", lambda node_id: Progress(0, drained=True))
    server = MasterServer(master, clock, MasterMetrics(CollectorRegistry()), Random(1), ownership=ownership)
    nodes = NodeList(server)
    first = answer(nodes, NodesRequest(versioned=True))
    assert [node.drained for node in first.nodes] == [num_owned == NUM_RANGES]
    ownership.map = replace(ownership.map, version=50)
    known = NodesRequest(versioned=True, known_version=first.version, known_generation=5)
    again = answer(nodes, known)
    assert (again.unchanged, first.signature.term.number, again.signature.term.number) == (True, 1, 50)
