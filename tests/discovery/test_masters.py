"""Where the master is: what --master names, and the guess that its answers correct."""

from __future__ import annotations

import pytest

from tanghulu.discovery.instance_wire import InstanceEntry
from tanghulu.discovery.masters import MasterFinder, leader_in
from tanghulu.errors import InvalidRequest, MasterUnavailable, NodeUnavailable, NotLeader, error_from_code
from tanghulu.masters import Masters
from tanghulu.rpc.wire import encode
from tanghulu.store.protocol.terms import Term, TermFence
from tanghulu.types import Address

A, B, C = (Address("h", port) for port in (1, 2, 3))


@pytest.mark.parametrize(
    ("text", "masters"),
    [
        ("h:1", Masters((A,))),
        ("h:1, h:2", Masters((A, B))),
        ("etcd://h:1", Masters((A,), in_etcd=True)),
        ("etcd://h:1,h:2/blue", Masters((A, B), in_etcd=True, namespace="blue")),
    ],
)
def test_masters_are_read_and_written(text: str, masters: Masters) -> None:
    assert Masters.parse(text) == masters
    assert Masters.parse(str(masters)) == masters
    assert masters.several is (text != "h:1")


@pytest.mark.parametrize("text", ["", "h", "h:1,", "h:1/blue", "etcd://", "etcd://h:1,x"])
def test_what_names_no_master_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        Masters.parse(text)


def test_the_error_carries_the_leader_over_the_wire() -> None:
    error = error_from_code(NotLeader.code, NotLeader.naming("h:2").message)
    assert isinstance(error, NotLeader)
    assert isinstance(error, MasterUnavailable), "who knows only one master takes it for absent"
    assert (error.leader, error.retryable) == ("h:2", True)
    assert NotLeader.naming("").leader == ""


def test_the_guess_follows_the_answers() -> None:
    finder = MasterFinder(Masters((A, B, C)))
    assert finder.current == A
    finder.failed(A, NotLeader.naming("h:3"))
    assert finder.current == C
    finder.failed(A, MasterUnavailable("late news"))
    assert finder.current == C, "of one that nobody asks any more"
    finder.failed(C, NodeUnavailable("refused"))
    assert finder.current == A
    finder.failed(A, NotLeader.naming(""))
    assert finder.current == B
    finder.failed(B, NotLeader.naming("elsewhere:9"))
    assert finder.current == Address("elsewhere", 9), "a leader that the list does not name"
    finder.failed(Address("elsewhere", 9), NodeUnavailable("refused"))
    assert finder.current == A
    finder.failed(A, NotLeader.naming("no address"))
    assert finder.current == B


def test_one_master_is_the_master() -> None:
    finder = MasterFinder(A)
    finder.failed(A, MasterUnavailable("gone"))
    assert finder.current == A


def test_with_an_etcd_it_is_asked_again() -> None:
    finder = MasterFinder("etcd://127.0.0.1:1")
    assert finder.current is None
    with pytest.raises(MasterUnavailable, match="etcd"):
        finder.find_blocking()


def test_a_malformed_leader_in_etcd_is_no_master() -> None:
    for value in (b"{", encode(InstanceEntry("m", "master", "no address"))):
        with pytest.raises(MasterUnavailable, match="malformed"):
            leader_in(value)


def test_a_node_refuses_older_terms_of_the_same_etcd() -> None:
    fence = TermFence()
    assert fence.admits(Term(0, 0)), "a single master has no term"
    assert fence.admits(Term(9, 1))
    assert not fence.admits(Term(7, 1))
    assert fence.admits(Term(9, 1))
    assert fence.admits(Term(3, 2)), "another etcd counts anew"
    assert not fence.admits(Term(2, 2))
    assert fence.newest == (3, 2)
