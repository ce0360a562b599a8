"""COMMIT of values written by a client under a lease: whether the acceptance that it shows counts."""

from __future__ import annotations

import pytest

from tanghulu.errors import TanghuluError
from tanghulu.store.node.state.chunk import Chunk, ChunkState
from tanghulu.store.node.state.confirmations import ReportOutcome
from tanghulu.store.node.state.outcomes import CommittedBy, Existed, Reserved
from tanghulu.store.protocol.messages import CommitItem, CommitRequest, ReserveRequest
from tanghulu.store.protocol.terms import NO_TERM, Term
from tanghulu.types import LeaseId
from tests.store.node.rig import GENERATION, SUM, new, put
from tests.store.node.test_puts import NOTHING, Rig, leases, results


class CommitRig(Rig):
    """A node whose client commits."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[list[ReportOutcome]] = []  # of the master, that somebody waits for

    def here(self, key: str) -> tuple[int, Chunk]:
        """(lease, range) of a value that has come."""
        reply = self.service.reserve(self.mine, ReserveRequest([new(key)], 1000), NOTHING)
        (lease_id,) = leases(reply)
        chunk = self.state.leases.chunk(LeaseId(lease_id))
        assert chunk is not None
        return lease_id, chunk

    async def say(
        self, lease_id: int, *, told: bool = True, generation: int = GENERATION, term: Term = NO_TERM
    ) -> list[bool | TanghuluError]:
        """COMMIT of a value that has come; ``told``: the master of ``term`` has accepted it."""
        request = CommitRequest([CommitItem(lease_id, SUM)], [], True, 1000, int(told), generation, term)
        outcomes = await results(self.service.commit(self.mine, request, NOTHING))
        self.state.check()
        return outcomes


@pytest.fixture
def rig() -> CommitRig:
    return CommitRig()


async def test_a_committed_value_is_live_at_once_and_announced_with_the_next_message(rig: CommitRig) -> None:
    lease_id, chunk = rig.here("k")
    assert rig.state.chunks.find(chunk.key) is None
    assert await rig.say(lease_id) == [False]
    assert chunk.state is ChunkState.LIVE
    assert chunk.checksums == SUM
    assert not rig.state.reports.leader.urgent
    assert rig.state.reports.leader.take().added == [chunk]


@pytest.mark.parametrize(("term", "stands"), [(7, False), (9, True), (11, True), (0, True)])
async def test_what_a_deposed_master_has_accepted_is_announced_to_its_successor(
    rig: CommitRig, term: int, stands: bool
) -> None:
    assert rig.state.admits(Term(9, 77))
    lease_id, chunk = rig.here("k")
    await rig.say(lease_id, term=Term(term, 77))
    assert chunk.state is (ChunkState.LIVE if stands else ChunkState.ANNOUNCING)
    assert not rig.state.admits(Term(7, 77))
    assert rig.state.admits(Term(9, 77)), "a client's word moves no node's fence"


@pytest.mark.parametrize(("told", "generation"), [(False, GENERATION), (True, 8)])
async def test_what_was_not_committed_for_this_run_waits_for_the_master(
    rig: CommitRig, told: bool, generation: int
) -> None:
    lease_id, chunk = rig.here("k")
    await rig.say(lease_id, told=told, generation=generation)
    assert chunk.state is ChunkState.ANNOUNCING
    assert rig.state.reports.leader.urgent


async def test_a_second_put_of_the_key_that_ends_first_wins_unless_the_master_has_chosen(rig: CommitRig) -> None:
    lease_id, mine = rig.here("k")
    theirs = rig.state.reserve(new("k", version=2), None)
    assert isinstance(theirs, Reserved)
    rig.state.commit(theirs.chunk, SUM, CommittedBy.NODE)  # announced to the master, who has not answered
    rig.state.reports.confirm([theirs.chunk], 9.0, rig.words.append)
    assert await rig.say(lease_id) == [False]
    assert rig.words == [[False]]
    assert rig.state.chunks.find(mine.key) is mine


async def test_a_committed_value_whose_key_the_master_has_confirmed_otherwise_is_a_hit(rig: CommitRig) -> None:
    lease_id, _ = rig.here("k")
    theirs = put(rig.state, new("k", version=2))
    assert not isinstance(theirs, Existed)
    rig.state.reports.confirm([theirs.chunk], 9.0, rig.words.append)
    rig.state.reports.leader.take()
    rig.state.reports.leader.done()
    rig.state.reported(theirs.chunk, accepted=True)
    assert await rig.say(lease_id) == [True]
    assert rig.words == [[True]]
