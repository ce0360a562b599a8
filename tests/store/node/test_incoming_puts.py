"""Streamed values at a node: what becomes of them by their putter's last word, or without it."""

from __future__ import annotations

import pytest

from tanghulu.errors import InvalidRequest
from tanghulu.runtime.clock import ManualClock
from tanghulu.store.node.state.chunk import ChunkState
from tanghulu.store.node.state.confirmations import ReportOutcome
from tanghulu.store.node.state.outcomes import Existed, Reserved
from tanghulu.store.node.writes.streams import MAX_FRACTION, IncomingPut, IncomingPuts, Settled
from tanghulu.store.protocol.checksums import NO_CHECKSUMS, Checksums
from tanghulu.store.protocol.messages import EndStreamRequest
from tanghulu.store.protocol.types import StreamEnd
from tests.store.node.rig import CAPACITY, GENERATION, SUM, make_state, new, put

OWNER, OTHER = "connection", "another"


class Rig:
    """A node of 4 KiB that values arrive at."""

    def __init__(self) -> None:
        self.state = make_state(ManualClock())
        self.arrivals = IncomingPuts(self.state)
        self.words: list[list[ReportOutcome]] = []  # of the master, that somebody waits for

    def begin(
        self, key: str, stream_id: int = 1, owner: str = OWNER, size: int = 64, version: int = 1
    ) -> IncomingPut | None:
        item = new(key, size, version).with_checksums(NO_CHECKSUMS)
        arrival = self.arrivals.begin(owner, stream_id, item, True, until_s=5.0)
        self.check()
        return arrival

    def here(self, key: str, stream_id: int = 1, owner: str = OWNER, version: int = 1) -> IncomingPut:
        arrival = self.begin(key, stream_id, owner, version=version)
        assert arrival is not None
        arrival.land()
        return arrival

    def say(
        self, word: StreamEnd, stream_id: int = 1, generation: int = GENERATION, sums: Checksums = SUM
    ) -> Settled | None:
        settled = self.arrivals.settle(OWNER, EndStreamRequest(stream_id, word, generation, sums))
        self.check()
        return settled

    def check(self) -> None:
        self.state.check()
        self.arrivals.check()


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_committed_value_is_live_at_once_and_announced_with_the_next_message(rig: Rig) -> None:
    arrival = rig.here("k")
    assert rig.state.find(arrival.chunk.key) is None
    settled = rig.say(StreamEnd.COMMITTED)
    assert settled.told
    assert isinstance(settled.written, Reserved)
    assert arrival.chunk.state is ChunkState.LIVE
    assert arrival.chunk.checksums == SUM
    assert not rig.state.reports.urgent
    assert rig.state.reports.take().added == [arrival.chunk]


@pytest.mark.parametrize(("word", "generation"), [(StreamEnd.ANNOUNCE, GENERATION), (StreamEnd.COMMITTED, 8)])
def test_what_was_not_committed_for_this_life_waits_for_the_master(rig: Rig, word: StreamEnd, generation: int) -> None:
    arrival = rig.here("k")
    settled = rig.say(word, generation=generation)
    assert not settled.told
    assert arrival.chunk.state is ChunkState.ANNOUNCING
    assert rig.state.reports.urgent


def test_a_dropped_value_leaves_nothing(rig: Rig) -> None:
    rig.here("k")
    assert rig.say(StreamEnd.DROP, sums=NO_CHECKSUMS).written is None
    assert rig.state.used_bytes == 0


def test_a_value_without_a_checksum_is_refused(rig: Rig) -> None:
    rig.here("k")
    assert isinstance(rig.say(StreamEnd.COMMITTED, sums=NO_CHECKSUMS).written, InvalidRequest)
    rig.here("k", 2)  # and so are checksums that do not cover it
    assert isinstance(rig.say(StreamEnd.COMMITTED, 2, sums=Checksums(7, (1, 2))).written, InvalidRequest)
    assert rig.state.used_bytes == 0


def test_a_connection_that_ends_leaves_nothing_wherever_its_values_stand(rig: Rig) -> None:
    rig.here("a", 1)
    assert rig.begin("b", 2) is not None
    kept = rig.here("c", 1, OTHER)
    rig.arrivals.gone(OWNER)
    rig.check()
    assert rig.state.used_bytes == kept.chunk.size_bytes
    assert rig.say(StreamEnd.COMMITTED) is None  # nobody knows that stream any more


def test_a_range_that_is_being_filled_is_nobody_elses(rig: Rig) -> None:
    arrival = rig.here("k")
    for number in range(200):
        put(rig.state, new(f"other-{number}"))
    rig.check()
    assert arrival.chunk.state is ChunkState.RESERVED
    taken = (arrival.chunk.offset, arrival.chunk.size_bytes)
    assert taken not in [(c.offset, c.size_bytes) for c in rig.state.table if c is not arrival.chunk]


def test_what_exists_is_not_received(rig: Rig) -> None:
    put(rig.state, new("k"))
    assert rig.begin("k") is None
    assert rig.begin("m", 3) is not None
    assert rig.begin("n", 3) is None  # a stream's number is taken


def test_all_arrivals_together_are_bounded(rig: Rig) -> None:
    bound = int(CAPACITY * MAX_FRACTION)
    assert rig.begin("a", 1, size=bound - 64) is not None
    assert rig.begin("b", 2, size=128) is None
    assert rig.begin("c", 3, size=64) is not None
    rig.arrivals.gone(OWNER)
    assert rig.begin("b", 2, size=128) is not None


def test_a_second_put_of_the_key_that_ends_first_wins_unless_the_master_has_chosen(rig: Rig) -> None:
    mine = rig.here("k", 1, version=1)
    theirs = put(rig.state, new("k", version=2))
    assert isinstance(theirs, Reserved)  # announced to the master, who has not answered
    rig.state.reports.confirm([theirs.chunk], 9.0, rig.words.append)
    settled = rig.say(StreamEnd.COMMITTED)
    assert isinstance(settled.written, Reserved)
    assert rig.words == [[False]]
    assert rig.state.find(mine.chunk.key) is mine.chunk


def test_a_committed_value_whose_key_the_master_has_confirmed_otherwise_is_a_hit(rig: Rig) -> None:
    rig.here("k", 1, version=1)
    theirs = put(rig.state, new("k", version=2))
    assert isinstance(theirs, Reserved)
    rig.state.reports.confirm([theirs.chunk], 9.0, rig.words.append)
    rig.state.reports.take()
    rig.state.reports.done()
    rig.state.reported(theirs.chunk, accepted=True)
    assert isinstance(rig.say(StreamEnd.COMMITTED).written, Existed)
    assert rig.words == [[True]]


def test_those_who_do_not_end_what_they_began_are_named(rig: Rig) -> None:
    rig.begin("a", 1)
    assert rig.arrivals.overdue(4.9) == []
    assert rig.arrivals.overdue(5.0) == [OWNER]
