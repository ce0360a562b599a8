"""Where a client's replicas go."""

from __future__ import annotations

from tanghulu.store.client.logic.effects import PeerId
from tanghulu.store.client.logic.placement import NodeTable
from tanghulu.store.client.model import NodeView


def node(name: str, place: str) -> NodeView:
    return NodeView(name, "h:1", "", "", place, "elsewhere", 100, 0, 0, False, 0.0)


def test_replicas_go_to_other_racks_then_to_other_hosts() -> None:
    table = NodeTable("here")
    places = {"a": "z/1/1", "b": "z/1/1", "c": "z/1/2", "d": "z/2/3", "e": "z/2/4"}
    table.update([node(name, place) for name, place in places.items()], 0.0)
    assert table.spread([PeerId(name) for name in "abcde"]) == list("adceb")
    assert table.spread([PeerId(name) for name in "ba"]) == list("ba"), "one host is better than none"
    assert table.spread([PeerId("unknown"), PeerId("a")]) == ["unknown", "a"]
