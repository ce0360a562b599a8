"""Reservations and commits at a node's fast lane: whose lease it is comes first, long work leaves others their turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tanghulu.auth.tenants import Identity, Right
from tanghulu.errors import LeaseExpired, MasterUnavailable
from tanghulu.rpc.fast_server import Later, Peer
from tanghulu.store.node.rpc.metrics import TrafficCounters
from tanghulu.store.node.rpc.service import NodeIdentity, NodeService
from tanghulu.store.node.rpc.sessions import Session, Sessions
from tanghulu.store.node.state.chunk import ChunkState
from tanghulu.store.node.state.outcomes import Holder
from tanghulu.store.node.writes import puts
from tanghulu.store.node.writes.puts import PutService
from tanghulu.store.protocol import checksums
from tanghulu.store.protocol.checksums import NO_CHECKSUMS
from tanghulu.store.protocol.messages import (
    CommitItem,
    CommitRequest,
    PutReply,
    PutRequest,
    Reservation,
    ReserveReply,
    ReserveRequest,
)
from tanghulu.store.protocol.types import NewChunk
from tanghulu.transfer_engine.core.segment import SegmentDescriptor, SessionKey
from tanghulu.types import ChunkKey, InstanceId
from tests.store.node.rig import CAPACITY, COPIES, GENERATION, MAPS, make_state
from tests.virtual.clock import ManualClock

STEP_BYTES = 64
SIZE = 1024
NOTHING = memoryview(b"")


class Told:
    """A master that hears of nothing; ``until_s`` is how long the last put would wait for it."""

    until_s = 0.0

    def kick(self) -> None:
        """Nobody is told."""

    def confirm(self, chunks: Any, until_s: float, done: Any) -> None:
        self.until_s = until_s
        done([True] * len(chunks))


class Rig:
    """A node of 4 KiB with two clients, whose memory is full of what others left there."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.state = make_state(self.clock)
        self.memory = bytearray(b"?" * CAPACITY)
        self.told = Told()
        self.puts = PutService(self.state, memoryview(self.memory), self.told)  # type: ignore[arg-type]
        sessions = Sessions(self.state, self.puts.room_changed)
        descriptor = SegmentDescriptor("store", CAPACITY, "here", GENERATION, ())
        identity = NodeIdentity(InstanceId("n"), GENERATION, descriptor)
        self.service = NodeService(identity, self.state, self.puts, sessions, TrafficCounters())
        self.mine, self.other = self.peer(COPIES), self.peer(MAPS)
        self.hashed_bytes = 0

    def peer(self, holder: Holder) -> Peer:
        number = holder.session_id
        return Peer(None, False, str(number), Session(SessionKey(number, b""), str(number), None, holder, (number,)))

    def reserve(self, *sizes: int) -> list[int]:
        """Leases of ``mine``."""
        new = [NewChunk(ChunkKey(f"k{n}"), 1, size) for n, size in enumerate(sizes)]
        reply = self.service.reserve(self.mine, ReserveRequest(new, 1000), NOTHING)
        return leases(reply)

    def commit(self, peer: Peer, *lease_ids: int) -> Any:
        items = [CommitItem(each, NO_CHECKSUMS) for each in lease_ids]
        return self.service.commit(peer, CommitRequest(items, [], True, 1000), NOTHING)


def leases(reply: Any) -> list[int]:
    assert isinstance(reply, ReserveReply), reply
    return [each.lease_id for each in reply.reservations if isinstance(each, Reservation)]


async def results(answer: Any) -> list[Any]:
    """What a COMMIT is answered, however it comes."""
    if isinstance(answer, Later):
        reply: list[Any] = []
        answer.then(reply.append)
        (answer,) = reply
    elif asyncio.iscoroutine(answer):
        answer = await answer
    assert isinstance(answer, PutReply)
    return answer.results


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(puts, "STEP_BYTES", STEP_BYTES)
    rig = Rig()
    add, compute = checksums.RunningChecksums.add, checksums.compute

    def counted(running: Any, piece: memoryview) -> None:
        rig.hashed_bytes += len(piece)
        add(running, piece)

    def computed(value: memoryview, part_bytes: int = 0) -> Any:
        rig.hashed_bytes += len(value)
        return compute(value, part_bytes)

    monkeypatch.setattr(checksums.RunningChecksums, "add", counted)
    monkeypatch.setattr(checksums, "compute", computed)
    return rig


async def until(condition: Callable[[], bool]) -> None:
    """Give others their turn until it is so."""
    while not condition():  # noqa: ASYNC110 - single steps of the loop are what the tests are about
        await asyncio.sleep(0)


async def turns(work: Any) -> tuple[Any, int]:
    """What ``work`` comes to, and how often others had their turn meanwhile."""
    task, number = asyncio.ensure_future(work), 0
    while not task.done():
        await asyncio.sleep(0)
        number += 1
    return task.result(), number


async def test_nothing_is_hashed_for_a_reservation_of_another_session(rig: Rig) -> None:
    (lease_id,) = rig.reserve(SIZE)
    outcomes = await results(rig.commit(rig.other, *[lease_id] * 100))
    assert all(isinstance(each, LeaseExpired) for each in outcomes)
    assert rig.hashed_bytes == 0
    assert await results(rig.commit(rig.mine, lease_id)) == [False]
    rig.state.check()


async def test_checksums_are_computed_step_by_step_and_once_each(rig: Rig) -> None:
    (lease_id,) = rig.reserve(SIZE)
    rig.memory[:] = bytes(range(256)) * (CAPACITY // 256)
    outcomes, num_turns = await turns(results(rig.commit(rig.mine, lease_id, lease_id)))
    assert outcomes[0] is False
    assert isinstance(outcomes[1], LeaseExpired)
    assert rig.hashed_bytes == SIZE
    assert num_turns >= SIZE // STEP_BYTES
    chunk = rig.state.chunks.current(ChunkKey("k0"))
    assert chunk is not None
    assert chunk.checksums == checksums.compute(rig.puts.bytes_of(chunk))


async def test_several_calls_share_the_steps(rig: Rig) -> None:
    first, second = rig.reserve(SIZE, SIZE)
    both = asyncio.gather(results(rig.commit(rig.mine, first)), results(rig.commit(rig.mine, second)))
    outcomes, num_turns = await turns(both)
    assert outcomes == [[False], [False]]
    assert num_turns >= 2 * SIZE // STEP_BYTES


async def test_a_connection_that_ends_while_checksums_are_computed_leaves_nothing(rig: Rig) -> None:
    task = asyncio.ensure_future(rig.commit(rig.mine, *rig.reserve(SIZE, SIZE)))
    await until(lambda: rig.hashed_bytes > 0)
    task.cancel()
    await asyncio.wait({task})
    assert rig.state.chunks.used_bytes == 0
    rig.state.check()


# --- keys that exist


async def test_a_key_does_not_exist_before_the_master_knows_it(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a put of it returns, and a remove after that finds nothing."""
    assert await results(rig.commit(rig.mine, *rig.reserve(SIZE))) == [False]
    waiting: list[Any] = []
    monkeypatch.setattr(rig.told, "confirm", lambda chunks, until_s, done: waiting.append(done))
    new = [NewChunk(ChunkKey("k0"), 2, SIZE)]
    unseen = rig.service.reserve(rig.other, ReserveRequest(new, 1000, False), NOTHING)
    assert isinstance(unseen, ReserveReply)
    task = asyncio.ensure_future(rig.service.reserve(rig.other, ReserveRequest(new, 1000), NOTHING))  # type: ignore[arg-type]
    await until(lambda: bool(waiting))
    await asyncio.sleep(0)
    assert not task.done()
    waiting[0]([True])
    assert (await task).reservations == [None]


async def test_a_key_that_the_master_may_not_know_is_an_error(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await results(rig.commit(rig.mine, *rig.reserve(SIZE))) == [False]
    error = MasterUnavailable("it does not answer")
    monkeypatch.setattr(rig.told, "confirm", lambda chunks, until_s, done: done([error]))
    new = [NewChunk(ChunkKey("k0"), 2, SIZE)]
    reply = await rig.service.reserve(rig.other, ReserveRequest(new, 1000), NOTHING)  # type: ignore[misc]
    assert [each.error.code for each in reply.reservations] == ["MASTER_UNAVAILABLE"]


# --- tenants that may not see memory


def untrusted(rig: Rig) -> None:
    rig.mine.identity = Identity("t", frozenset({Right.WRITE}), "acme")


async def test_ranges_of_an_untrusted_tenant_are_wiped_step_by_step_before_they_can_be_committed(rig: Rig) -> None:
    untrusted(rig)
    new = [NewChunk(ChunkKey("k"), 1, SIZE)]
    task = asyncio.ensure_future(rig.service.reserve(rig.mine, ReserveRequest(new, 1000), NOTHING))  # type: ignore[arg-type]
    await until(lambda: 0 in rig.memory)
    (guessed,) = (lease_id for lease_id, _ in rig.state.leases.leases())
    (refused,) = await results(rig.commit(rig.mine, guessed))
    assert isinstance(refused, LeaseExpired)
    assert not task.done()
    (lease_id,) = leases(await task)
    assert lease_id == guessed
    assert rig.memory.count(0) == SIZE
    assert await results(rig.commit(rig.mine, lease_id)) == [False]


async def test_wiping_leaves_other_calls_their_turn(rig: Rig) -> None:
    untrusted(rig)
    new = [NewChunk(ChunkKey("k"), 1, SIZE)]
    _, num_turns = await turns(rig.service.reserve(rig.mine, ReserveRequest(new, 1000), NOTHING))
    assert num_turns >= SIZE // STEP_BYTES


async def test_a_range_that_ended_while_it_was_wiped_is_let_alone(rig: Rig) -> None:
    untrusted(rig)
    new = [NewChunk(ChunkKey("k"), 1, SIZE)]
    task = asyncio.ensure_future(rig.service.reserve(rig.mine, ReserveRequest(new, 1000), NOTHING))  # type: ignore[arg-type]
    await until(lambda: 0 in rig.memory)
    rig.clock.advance(60.0)
    rig.state.expire(rig.clock.now_s())
    wiped = rig.memory.count(0)
    assert wiped < SIZE
    await task
    assert rig.memory.count(0) == wiped
    assert rig.state.chunks.used_bytes == 0


async def test_a_connection_that_ends_before_it_hears_of_its_ranges_leaves_nothing(rig: Rig) -> None:
    held = rig.reserve(*[SIZE] * (CAPACITY // SIZE))
    new = [NewChunk(ChunkKey(f"late{n}"), 1, SIZE) for n in range(2)]
    request = ReserveRequest(new, 60_000)
    task = asyncio.ensure_future(rig.service.reserve(rig.other, request, NOTHING))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    rig.state.leases.unpin(held[:1], (1,))
    rig.puts.room_changed()
    await asyncio.sleep(0)  # the first has its range, the second waits
    rig.state.leases.unpin(held[1:2], (1,))
    rig.puts.room_changed()  # and has it in the very step in which nobody wants it any more
    task.cancel()
    await asyncio.wait({task})
    assert rig.state.chunks.used_bytes == SIZE * (CAPACITY // SIZE - 2)
    assert not [
        chunk for chunk in rig.state.chunks.table if chunk.key.startswith("late") and chunk.state is ChunkState.RESERVED
    ]
    rig.state.check()


@pytest.mark.parametrize(("master_ms", "waits_s"), [(600_000, 600.0), (0, 1.0)])
async def test_a_put_waits_for_the_master_longer_than_for_room(rig: Rig, master_ms: int, waits_s: float) -> None:
    """Without a time for the master, the one for room holds there, too."""
    before_s = asyncio.get_running_loop().time()
    items = [NewChunk(ChunkKey("k"), 1, 3)]
    answer = rig.service.put(rig.mine, PutRequest(items, True, 1000, master_ms), memoryview(b"abc"))
    assert await results(answer) == [False]
    assert waits_s <= rig.told.until_s - before_s < waits_s + 300.0
