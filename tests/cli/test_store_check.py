"""``tanghulu store check`` goes on when a node does not answer, and says which."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import pytest

from tanghulu.cli.store_admin import Disagreement, _complain
from tanghulu.errors import ChecksumMismatch, DeadlineExceeded, NodeUnavailable
from tanghulu.store.admin.check import CheckFinding, Kind, find
from tanghulu.store.admin.orders import perform
from tanghulu.store.client import Client
from tanghulu.store.client.model import KeyInfo, NodeView
from tanghulu.store.protocol.messages import Verified, VerifiedPage


def view(node: str) -> NodeView:
    return NodeView(node, "127.0.0.1:1", "", "", "z/r/h", "host", 1 << 20, 0, 1, False, 0.1)


class Store:
    """Two nodes hold a chunk each; one of them answers late, or only the first time not."""

    def __init__(self, silent: str, times: int) -> None:
        self.silent, self.times = silent, times

    def nodes(self) -> list[NodeView]:
        return [view("a"), view("b")]

    def list_keys(self) -> list[KeyInfo]:
        return [KeyInfo("k", 5, 7, ("a",)), KeyInfo("l", 5, 8, ("b",))]

    def verify(self, node: str, after: str, **_: Any) -> VerifiedPage:
        if node == self.silent and self.times:
            self.times -= 1
            raise DeadlineExceeded(f"{node} did not answer in time")
        key, version = ("k", 7) if node == "a" else ("l", 8)
        return VerifiedPage((Verified(key, version, 5, False),), False)


def test_a_node_that_stands_still_is_named_and_the_others_are_looked_at() -> None:
    findings, num_chunks = perform(find, cast("Client", Store("b", 2)))
    assert findings == [CheckFinding(Kind.SILENT, "b", "")], "no word of its chunks: nobody has looked at them"
    assert num_chunks == 1


def test_a_node_that_answers_at_the_second_look_is_well() -> None:
    assert perform(find, cast("Client", Store("b", 1))) == ([], 2)


@pytest.mark.parametrize(
    ("left", "error"),
    [
        ([Kind.CORRUPT, Kind.SILENT, Kind.MISSING], ChecksumMismatch),
        ([Kind.SILENT, Kind.MISSING], NodeUnavailable),
        ([Kind.MISSING, Kind.UNLISTED], Disagreement),
    ],
)
def test_the_worst_is_said(left: list[Kind], error: type[Exception]) -> None:
    with pytest.raises(error):
        _complain(Counter(left))
    _complain(Counter())
