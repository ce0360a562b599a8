"""Where a client's replicas go."""

from __future__ import annotations

import pytest

from tanghulu.errors import NodeUnavailable
from tanghulu.masters import Masters
from tanghulu.store.client.drivers.connections import target_of
from tanghulu.store.client.logic.effects import PeerId
from tanghulu.store.client.logic.placement import SILENT_PAUSE_S, NodeTable
from tanghulu.store.client.model import NodeView
from tanghulu.store.client.settings import Settings


def node(name: str, place: str) -> NodeView:
    return NodeView(name, "h:1", "", "", place, "elsewhere", 100, 0, 0, False, 0.0)


def test_replicas_go_to_other_racks_then_to_other_hosts() -> None:
    table = NodeTable("here")
    places = {"a": "z/1/1", "b": "z/1/1", "c": "z/1/2", "d": "z/2/3", "e": "z/2/4"}
    table.update([node(name, place) for name, place in places.items()], 0.0)
    assert table.spread([PeerId(name) for name in "abcde"]) == list("adceb")
    assert table.spread([PeerId(name) for name in "ba"]) == list("ba"), "one host is better than none"
    assert table.spread([PeerId("unknown"), PeerId("a")]) == ["unknown", "a"]


def test_a_node_whose_host_did_not_answer_is_left_alone_for_a_while() -> None:
    table, settings = NodeTable("here"), Settings(master=Masters.parse("h:1"))
    table.update([node("a", "z/1/1"), node("b", "z/1/2")], 0.0)
    table.note_silent(PeerId("a"), 1.0)
    table.update([node("a", "z/1/1"), node("b", "z/1/2")], 1.5)
    with pytest.raises(NodeUnavailable, match="did not answer a moment ago"):
        target_of(PeerId("a"), settings, table, 2.0)
    assert target_of(PeerId("b"), settings, table, 2.0).address.port == 1
    assert target_of(PeerId("a"), settings, table, 1.0 + SILENT_PAUSE_S).address.port == 1
