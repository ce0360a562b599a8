"""Puts that wait for the master's word, in virtual time."""

from __future__ import annotations

from tanghulu.errors import MasterUnavailable
from tanghulu.store.node.state.chunk import Chunk
from tanghulu.store.node.state.confirmations import Confirmations, ReportOutcome
from tanghulu.store.protocol.checksums import NO_CHECKSUMS
from tanghulu.store.protocol.types import Pin
from tanghulu.types import ChunkKey

LATE = MasterUnavailable("late")


def chunk(key: str) -> Chunk:
    return Chunk.reserved(ChunkKey(key), 1, 0, 1, NO_CHECKSUMS, Pin.NONE, 0.0)


def test_a_put_is_done_when_its_last_chunk_has_a_word() -> None:
    confirmations, heard = Confirmations(), list[list[ReportOutcome]]()
    a, b, c = chunk("a"), chunk("b"), chunk("c")
    confirmations.expect([a, b, c], [a, c], 5.0, heard.append)
    assert confirmations.next_s == 5.0
    confirmations.settle(c, stands=False)
    confirmations.check()
    assert not heard
    confirmations.settle(a, stands=True)
    confirmations.check()
    assert heard == [[True, True, False]]
    assert confirmations.next_s is None


def test_what_stands_already_is_not_waited_for() -> None:
    confirmations, heard = Confirmations(), list[list[ReportOutcome]]()
    confirmations.expect([chunk("a")], [], 5.0, heard.append)
    assert heard == [[True]]


def test_a_deadline_ends_one_put_and_leaves_the_chunk_to_those_who_wait_longer() -> None:
    confirmations, heard = Confirmations(), list[tuple[str, list[ReportOutcome]]]()
    a, b = chunk("a"), chunk("b")
    confirmations.expect([a, b], [a, b], 1.0, lambda words: heard.append(("early", words)))
    confirmations.expect([b], [b], 2.0, lambda words: heard.append(("late", words)))
    confirmations.settle(a, stands=True)
    assert confirmations.expire(0.9, LATE) == []
    assert confirmations.expire(1.0, LATE) == []
    assert heard == [("early", [True, LATE])]
    assert confirmations.next_s == 2.0
    assert confirmations.expire(2.0, LATE) == [b]
    assert heard[1] == ("late", [LATE])
    confirmations.settle(b, stands=True)  # too late for everybody, and no error
    confirmations.check()
