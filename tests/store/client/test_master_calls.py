"""Calls to masters as logic: which master is called next, how often, and which answers count. No sockets, no time."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tanghulu.discovery.masters import MasterFinder
from tanghulu.errors import ChunkNotFound, DeadlineExceeded, KeysMoved, MasterUnavailable, NodeUnavailable, NotLeader
from tanghulu.rpc.fast_client import Reply
from tanghulu.store.client.logic.context import Context
from tanghulu.store.client.logic.effects import MASTER, CallPeers, PeerId, Sleep, owner_peer
from tanghulu.store.client.logic.master_calls import MasterCalls
from tanghulu.store.client.logic.placement import NodeTable
from tanghulu.store.protocol import methods
from tanghulu.store.protocol.messages import LocateReply, LocateRequest, ProveReply
from tanghulu.store.protocol.terms import Renewals, Signature, Term
from tanghulu.types import Address
from tests.virtual.clock import ManualClock

LOCATE = methods.LOCATE.call(LocateRequest(["k"], False))
ETCD = 7
AWAY = NodeUnavailable("refused")


def answer(term: int = 0, renewals: Renewals | None = None) -> Reply[Any]:
    packed = 0 if renewals is None else renewals.packed
    return Reply(LocateReply(False, (None,), b"", Signature(Term(term, ETCD if term else 0), packed)), memoryview(b""))


class Driver:
    """Performs the effects of MasterCalls from a list of outcomes, one each; each call takes 10 ms."""

    def __init__(self, masters: str = "a:1", *, met: bool = True, waits: bool = True) -> None:
        self.clock = ManualClock()
        self.context = Context("here", "", self.clock, NodeTable("here"))
        self.finder = MasterFinder(masters)
        self.calls = MasterCalls(self.context, self.finder, 60.0, waits=waits)
        self.calls.has_met_master = met
        self.called: list[tuple[str, int]] = []  # address or peer, method
        self.num_pauses = 0

    def run(self, outcomes: Callable[[int], Any], peers: tuple[PeerId, ...] = (MASTER,), **more: Any) -> list[Any]:
        """``outcomes(number of the call)`` for every call; the deadline is 5 s away."""
        logic = self.calls.call([(peer, LOCATE) for peer in peers], 5.0, **{"waits": True, **more})
        try:
            effect = next(logic)
            while True:
                sent: Any = None
                if isinstance(effect, CallPeers):
                    sent = []
                    for peer, call in effect.calls:
                        sent.append(outcomes(len(self.called)))
                        self.called.append((peer or str(self.finder.current), call.method))
                    self.clock.advance(0.01)
                else:
                    assert isinstance(effect, Sleep)
                    self.num_pauses += 1
                    self.clock.advance(effect.seconds)
                effect = logic.send(sent)
        except StopIteration as end:
            result: list[Any] = end.value
            return result


def test_an_answer_is_returned_and_so_is_a_masters_own_error() -> None:
    driver, right, wrong = Driver(), answer(), ChunkNotFound("no")
    assert driver.run(lambda _: right) == [right]
    assert driver.run(lambda _: wrong) == [wrong]
    assert len(driver.called) == 2


def test_a_lone_master_is_called_again_at_once_then_after_pauses_until_the_deadline() -> None:
    driver, right = Driver(), answer()
    assert driver.run(lambda number: AWAY if number < 1 else right) == [right]
    assert driver.num_pauses == 0, "a connection to the master before may have been dead"
    assert driver.run(lambda number: AWAY if number < 6 else right) == [right]
    assert driver.num_pauses == 3
    (gone,) = driver.run(lambda _: AWAY)
    assert isinstance(gone, MasterUnavailable)
    assert re.match(r"no master answered at a:1 for \d\.\d s: ", gone.message)
    assert driver.clock.now_s() <= 7.0


@pytest.mark.parametrize("why", [{"met": False}, {"waits": False}])
def test_a_lone_master_is_not_waited_for_where_nobody_wants_that(why: dict[str, bool]) -> None:
    driver = Driver(**why)  # type: ignore[arg-type]
    assert isinstance(driver.run(lambda _: AWAY)[0], MasterUnavailable)
    assert driver.num_pauses == 0
    driver = Driver()
    assert isinstance(driver.run(lambda _: DeadlineExceeded("silent"), waits=False)[0], MasterUnavailable)
    assert len(driver.called) == 1


def test_of_several_masters_the_named_leader_is_called_next_or_else_the_next_one() -> None:
    driver, right = Driver("a:1,b:1,c:1", met=False), answer()
    outcomes = [NotLeader.naming("c:1"), AWAY, right]
    assert driver.run(lambda number: outcomes[number], waits=False) == [right]
    assert [peer for peer, _ in driver.called] == ["a:1", "c:1", "a:1"]


def test_keys_that_moved_are_no_reason_to_seek_another_leader() -> None:
    driver, moved = Driver("a:1,b:1"), KeysMoved("not all are mine")
    assert driver.run(lambda _: moved) == [moved]
    assert str(driver.finder.current) == "a:1"


def test_owners_are_called_once_and_their_silence_is_a_masters() -> None:
    driver, right = Driver(), answer()
    peers = owner_peer(Address("a", 1)), owner_peer(Address("b", 1))
    first, second = driver.run(lambda number: right if number == 0 else AWAY, peers)
    assert first is right
    assert isinstance(second, MasterUnavailable)
    assert len(driver.called) == 2


def test_an_answer_counts_when_its_master_has_proven_that_its_lease_lives() -> None:
    driver, right = Driver("a:1,b:1"), answer(5, Renewals(3, 3))
    proof = Reply(ProveReply(Signature(Term(5, ETCD), Renewals(4, 4).packed), 3, 3000), memoryview(b""))
    assert driver.run(lambda number: right if number == 0 else proof) == [right]
    assert [method for _, method in driver.called] == [LOCATE.method, methods.PROVE.number]
    assert driver.run(lambda _: right) == [right]
    assert len(driver.called) == 3, "proven for a while"


def test_an_answer_without_proof_or_of_a_term_that_is_over_does_not_count() -> None:
    driver, right = Driver("a:1,b:1"), answer(5, Renewals(3, 3))
    stale = Reply(ProveReply(Signature(Term(5, ETCD), Renewals(3, 3).packed), 3, 3000), memoryview(b""))
    (unproven,) = driver.run(lambda number: (right, stale)[number % 2])
    assert isinstance(unproven, MasterUnavailable)
    assert driver.context.masters.fence.admits(Term(9, ETCD))
    (deposed,) = driver.run(lambda _: answer(5))
    assert isinstance(deposed, NotLeader)
    assert "one of term 9 has led since" in deposed.message
