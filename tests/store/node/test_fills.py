"""Reservations whose values follow on the same connection: what becomes of them by their COMMIT, or without it."""

from __future__ import annotations

from typing import Any

import pytest

from tanghulu.errors import InvalidRequest, LeaseExpired, Overloaded, TanghuluError
from tanghulu.rpc.fast_server import NO_ANSWER, Peer
from tanghulu.store.node.state.chunk import ChunkState
from tanghulu.store.node.state.confirmations import ReportOutcome
from tanghulu.store.node.state.outcomes import CommittedBy, Existed, Reserved
from tanghulu.store.node.writes import fills
from tanghulu.store.node.writes.fills import MAX_FILL_S, MAX_FRACTION, Fill
from tanghulu.store.protocol.checksums import NO_CHECKSUMS, Checksums
from tanghulu.store.protocol.messages import CommitItem, CommitRequest, ReserveRequest
from tanghulu.store.protocol.terms import NO_TERM, Term
from tanghulu.types import ChunkKey
from tests.store.node.rig import CAPACITY, GENERATION, SUM, new, put
from tests.store.node.test_puts import NOTHING, Rig, results


class FillRig(Rig):
    """A node of 4 KiB that values arrive at."""

    def __init__(self) -> None:
        super().__init__()
        self.fills = self.puts.fills
        self.hung_up: list[Peer] = []
        self.words: list[list[ReportOutcome]] = []  # of the master, that somebody waits for
        for peer in (self.mine, self.other):
            peer.hang_up = lambda peer=peer: self.hung_up.append(peer)  # type: ignore[misc]

    def begin(self, key: str, number: int = 1, size: int = 64, version: int = 1, peer: Peer | None = None) -> Any:
        """What comes of a value whose head is there."""
        peer = peer or self.mine
        item = new(key, size, version).with_checksums(NO_CHECKSUMS)
        begun = self.fills.begin(peer, number, item)
        self.check()
        return begun

    def here(self, key: str, number: int = 1, version: int = 1, value: bytes = b"v" * 64) -> Fill:
        """A value that has come."""
        begun = self.begin(key, number, len(value), version)
        assert isinstance(begun, Fill)
        self.puts.bytes_of(begun.chunk)[:] = value
        self.fills.filled(begun)
        self.check()
        return begun

    async def say(
        self,
        number: int = 1,
        *,
        told: bool = True,
        generation: int = GENERATION,
        sums: Checksums = SUM,
        term: Term = NO_TERM,
    ) -> list[bool | TanghuluError]:
        """COMMIT of a value that has come; ``told``: the master of ``term`` has accepted it."""
        request = CommitRequest([CommitItem(number, sums)], [], True, 1000, int(told), generation, True, *term)
        outcomes = await results(self.service.commit(self.mine, request, NOTHING))
        self.check()
        return outcomes

    def lose(self, peer: Peer) -> None:
        """Its connection ends."""
        for callback in peer.on_close:
            callback()
        self.check()

    def check(self) -> None:
        self.state.check()
        self.fills.check()


@pytest.fixture
def rig() -> FillRig:
    return FillRig()


async def test_a_committed_value_is_live_at_once_and_announced_with_the_next_message(rig: FillRig) -> None:
    fill = rig.here("k")
    assert rig.state.chunks.find(fill.chunk.key) is None
    assert await rig.say() == [False]
    assert fill.chunk.state is ChunkState.LIVE
    assert fill.chunk.checksums == SUM
    assert not rig.state.reports.leader.urgent
    assert rig.state.reports.leader.take().added == [fill.chunk]


@pytest.mark.parametrize(("term", "stands"), [(7, False), (9, True), (11, True), (0, True)])
async def test_what_a_deposed_master_has_accepted_is_announced_to_its_successor(
    rig: FillRig, term: int, stands: bool
) -> None:
    assert rig.state.obeys(9, 77)
    fill = rig.here("k")
    await rig.say(term=Term(term, 77))
    assert fill.chunk.state is (ChunkState.LIVE if stands else ChunkState.ANNOUNCING)
    assert not rig.state.obeys(7, 77)
    assert rig.state.obeys(9, 77), "a client's word moves no node's fence"


@pytest.mark.parametrize(("told", "generation"), [(False, GENERATION), (True, 8)])
async def test_what_was_not_committed_for_this_run_waits_for_the_master(
    rig: FillRig, told: bool, generation: int
) -> None:
    fill = rig.here("k")
    await rig.say(told=told, generation=generation)
    assert fill.chunk.state is ChunkState.ANNOUNCING
    assert rig.state.reports.leader.urgent


async def test_an_aborted_value_leaves_nothing(rig: FillRig) -> None:
    rig.here("k")
    request = CommitRequest([], [1], True, 1000, filled=True)
    assert await results(rig.service.commit(rig.mine, request, NOTHING)) == []
    assert rig.state.chunks.used_bytes == 0
    rig.check()


async def test_checksums_are_computed_where_none_are_said_and_refused_where_they_do_not_fit(rig: FillRig) -> None:
    fill = rig.here("k", value=b"abc" * 50)
    assert await rig.say(told=False, sums=NO_CHECKSUMS) == [False]
    assert rig.puts.verify(fill.chunk)
    rig.here("m", 2)
    (refused,) = await rig.say(2, sums=Checksums(7, (1, 2)))
    assert isinstance(refused, InvalidRequest)
    assert rig.state.chunks.current(ChunkKey("m")) is None


async def test_a_connection_that_ends_leaves_nothing_wherever_its_values_stand(rig: FillRig) -> None:
    rig.here("a", 1)
    assert isinstance(rig.begin("b", 2), Fill)
    kept = rig.begin("c", 1, peer=rig.other)
    rig.lose(rig.mine)
    assert rig.state.chunks.used_bytes == kept.chunk.size_bytes
    (nothing,) = await rig.say()  # nobody knows that number any more
    assert isinstance(nothing, LeaseExpired)


def test_a_range_that_is_being_filled_is_nobody_elses_even_when_its_time_is_up(rig: FillRig) -> None:
    fill = rig.begin("k")
    rig.fills.tick()
    assert rig.hung_up == []
    rig.clock.advance(MAX_FILL_S)
    rig.state.expire(rig.clock.now_s())
    rig.fills.tick()
    assert rig.hung_up == [rig.mine]
    for number in range(200):
        put(rig.state, new(f"other-{number}"))
    taken = (fill.chunk.offset, fill.chunk.size_bytes)
    assert taken not in [(c.offset, c.size_bytes) for c in rig.state.chunks.table if c is not fill.chunk]
    rig.lose(rig.mine)
    assert fill.chunk.state is ChunkState.GONE


def test_a_connection_that_does_not_commit_what_has_come_is_cut(rig: FillRig) -> None:
    rig.here("k")
    rig.clock.advance(MAX_FILL_S)
    rig.fills.tick()
    assert rig.hung_up == [rig.mine]
    rig.lose(rig.mine)
    assert rig.state.chunks.used_bytes == 0


async def test_what_exists_is_not_received_and_commit_says_so(rig: FillRig) -> None:
    put(rig.state, new("k"))
    item = new("k").with_checksums(NO_CHECKSUMS)
    request = ReserveRequest([item], 1000, 1)
    assert rig.service.receive(rig.mine, request, 64) is None
    assert rig.service.reserve(rig.mine, request, memoryview(bytes(64))) is NO_ANSWER
    assert await rig.say() == [True]
    rig.check()


def test_numbers_are_unique_and_bounded(rig: FillRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.begin("m", 3)
    with pytest.raises(InvalidRequest):
        rig.begin("n", 3)
    monkeypatch.setattr(fills, "MAX_FILLS", 4)
    for number in (4, 5, 6):
        rig.here(f"n{number}", number)
    with pytest.raises(Overloaded):
        rig.begin("one too many", 7)


async def test_a_value_of_another_size_than_was_said_is_refused(rig: FillRig) -> None:
    request = ReserveRequest([new("k", 65)], 1000, 1)
    with pytest.raises(InvalidRequest):
        rig.service.reserve(rig.mine, request, memoryview(bytes(64)))
    assert rig.state.chunks.used_bytes == 0


async def test_all_that_is_coming_together_is_bounded(rig: FillRig) -> None:
    bound = int(CAPACITY * MAX_FRACTION)
    assert isinstance(rig.begin("a", 1, size=bound - 64), Fill)
    assert isinstance(rig.begin("b", 2, size=128), Overloaded)
    assert isinstance(rig.begin("c", 3, size=64), Fill)
    rig.lose(rig.mine)
    assert isinstance(rig.begin("b", 2, size=128), Fill)


async def test_a_second_put_of_the_key_that_ends_first_wins_unless_the_master_has_chosen(rig: FillRig) -> None:
    mine = rig.here("k", 1, version=1)
    theirs = rig.state.reserve_at_once(new("k", version=2), None)
    assert isinstance(theirs, Reserved)
    rig.state.commit(theirs.chunk, SUM, CommittedBy.NODE)  # announced to the master, who has not answered
    rig.state.reports.confirm([theirs.chunk], 9.0, rig.words.append)
    assert await rig.say() == [False]
    assert rig.words == [[False]]
    assert rig.state.chunks.find(mine.chunk.key) is mine.chunk


async def test_a_committed_value_whose_key_the_master_has_confirmed_otherwise_is_a_hit(rig: FillRig) -> None:
    rig.here("k", 1, version=1)
    theirs = put(rig.state, new("k", version=2))
    assert not isinstance(theirs, Existed)
    rig.state.reports.confirm([theirs.chunk], 9.0, rig.words.append)
    rig.state.reports.leader.take()
    rig.state.reports.leader.done()
    rig.state.reported(theirs.chunk, accepted=True)
    assert await rig.say() == [True]
    assert rig.words == [[True]]
