"""Calls of many items: no step of the loop works on more than a few, whatever becomes of them."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tanghulu.errors import InvalidRequest
from tanghulu.eviction import make_policy
from tanghulu.rpc.fast_server import Peer
from tanghulu.rpc.wire import Failure
from tanghulu.store.node.rpc.metrics import TrafficCounters
from tanghulu.store.node.rpc.service import NodeService
from tanghulu.store.node.rpc.sessions import Session
from tanghulu.store.node.ssd.admission import TierAdmission
from tanghulu.store.node.ssd.tier import SsdPlace, SsdTier, open_tier
from tanghulu.store.node.state.chunk import Chunk
from tanghulu.store.node.state.node_state import make_node_state
from tanghulu.store.node.state.outcomes import Reserved
from tanghulu.store.node.state.ssd_record import UNIT, SsdRecord, encode_head
from tanghulu.store.node.writes.puts import STEP_ITEMS, PutService
from tanghulu.store.protocol.checksums import NO_CHECKSUMS, compute
from tanghulu.store.protocol.directory_messages import MAX_KEYS_PER_CALL
from tanghulu.store.protocol.messages import CommitItem, CommitRequest, PutReply, UnpinRequest
from tanghulu.transfer_engine.core.access import AccessTable
from tanghulu.transfer_engine.core.segment import SessionKey
from tanghulu.types import ChunkKey
from tests.store.node.rig import COPIES, GENERATION, LEASE_MS, new, put, reserve_or_wait
from tests.virtual.clock import ManualClock

MANY = 5 * STEP_ITEMS


class MasterThatAgrees:
    """In the place of the reporter."""

    def __init__(self) -> None:
        self.asked: list[ChunkKey] = []

    def confirm(self, chunks: Sequence[Chunk], until_s: float, told: Callable[[list[bool]], None]) -> None:
        self.asked += [chunk.key for chunk in chunks]
        told([True] * len(chunks))

    def kick(self) -> None:
        pass


class Rig:
    def __init__(self) -> None:
        access = AccessTable(ManualClock(), LEASE_MS, 0)
        access.open_session(1, None)
        capacity = 2 * 64 * MANY
        self.state = make_node_state(capacity, access, lambda: make_policy("lru"), ManualClock(), generation=GENERATION)
        self.master = MasterThatAgrees()
        puts = PutService(self.state, memoryview(bytearray(capacity)), self.master)  # type: ignore[arg-type]
        self.service = NodeService(None, self.state, puts, None, TrafficCounters())  # type: ignore[arg-type]
        self.peer = Peer(None, False, "client")
        self.peer.state = Session(SessionKey(1, b""), "client", None, COPIES, (1,))

    async def call(self, handler: Callable[..., Any], request: Any) -> Any:
        return await handler(self.peer, request, memoryview(b""))


class Steps:
    """Counts what is done from one turn of the loop to the next."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.most = self.total = self._in_this = 0
        done = getattr(owner, name)

        def counted(*given: Any, **named: Any) -> Any:
            self.total += 1
            self._in_this += 1
            if self._in_this == 1:
                asyncio.get_running_loop().call_soon(self._end)
            self.most = max(self.most, self._in_this)
            return done(*given, **named)

        monkeypatch.setattr(owner, name, counted)

    def _end(self) -> None:
        self._in_this = 0


async def test_commits_of_what_is_not_the_clients_are_done_with_in_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    other = reserve_or_wait(rig.state, new("theirs"), rig.peer.state.holder)
    assert isinstance(other, Reserved)
    rig.peer.state = Session(SessionKey(3, b""), "thief", None, COPIES, (3,))
    told = Steps(monkeypatch, Failure, "of")
    items = [CommitItem(other.lease_id, NO_CHECKSUMS)] * MANY
    answer: PutReply = await rig.call(rig.service.commit, CommitRequest(items, [], True, 0))
    assert {each.code for each in answer.outcomes if isinstance(each, Failure)} == {"LEASE_EXPIRED"}
    assert len(answer.outcomes) == told.total == MANY
    assert told.most <= STEP_ITEMS
    rig.state.check()


async def test_many_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the client has committed at the master are not asked about; one that is refused shifts no other."""
    rig = Rig()
    sums = compute(bytes(1))
    reserved = [reserve_or_wait(rig.state, new(str(number), 1), rig.peer.state.holder) for number in range(MANY)]
    items = [CommitItem(each.lease_id, sums) for each in reserved if isinstance(each, Reserved)]
    assert len(items) == MANY
    items[3] = CommitItem(99_999, sums)
    committed = Steps(monkeypatch, rig.state, "commit")
    request = CommitRequest(items, [], True, 0, num_committed=MANY - 10, generation=GENERATION)
    answer: PutReply = await rig.call(rig.service.commit, request)
    assert [place for place, each in enumerate(answer.outcomes) if isinstance(each, Failure)] == [3]
    assert committed.total == MANY - 1
    assert committed.most <= STEP_ITEMS
    assert rig.master.asked == [str(number) for number in range(MANY - 10, MANY)]
    rig.state.check()


async def test_many_leases_that_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    put(rig.state, new("chunk"))
    rig.state.chunks.end_call()
    chunk = rig.state.chunks.look_up(ChunkKey("chunk"))
    assert chunk is not None
    released = Steps(monkeypatch, rig.state.leases.access, "release")
    for handler, request in (
        (rig.service.unpin, lambda ids: UnpinRequest(ids, 0, [], [])),
        (rig.service.commit, lambda ids: CommitRequest([], ids, True, 0)),
    ):
        ids = [rig.state.leases.pin(chunk, COPIES).lease_id for _ in range(MANY)]
        await rig.call(handler, request(ids))
        assert len(rig.state.leases) == 0
        assert released.most <= STEP_ITEMS
    assert released.total == 2 * MANY
    for corrupt, read in (([], ["chunk"] * (MAX_KEYS_PER_CALL + 1)), (["chunk"] * (MAX_KEYS_PER_CALL + 1), [])):
        lease_id = rig.state.leases.pin(chunk, COPIES).lease_id
        with pytest.raises(InvalidRequest):
            await rig.call(rig.service.unpin, UnpinRequest([lease_id], 0, corrupt, read))
        assert len(rig.state.leases) == 0


async def test_many_records_of_a_file_are_entered_while_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start enters what its file holds; the masters' map and etcd's leases are seen to meanwhile."""
    num, checksums = 4_000, compute(b"value")

    def opened() -> SsdTier:
        place = SsdPlace(tmp_path / "tier", 2 * num * UNIT, 0)
        admission, clock = TierAdmission("all", MANY * UNIT), ManualClock()
        return open_tier(place, memoryview(b""), admission, lambda: make_policy("lru"), clock, lambda entry: None)

    tier, unit = opened(), mmap.mmap(-1, UNIT)  # direct I/O wants whole pages
    for number in range(num):
        record = SsdRecord(ChunkKey(f"k{number}"), 1, 5, checksums, sequence=number + 1)
        head = encode_head(record, number * UNIT, tier.file.file_id)
        unit[: len(head) + 5] = head + b"value"
        tier.file.write(number * UNIT, memoryview(unit))
    await tier.close()
    tier = opened()
    entered = Steps(monkeypatch, tier.state, "recover")
    await tier.recover()
    tier.check()
    assert entered.total == len(tier.state) == num
    assert entered.most <= 512
    await tier.close()


async def test_leases_are_given_back_though_the_connection_ends() -> None:
    rig = Rig()
    put(rig.state, new("chunk"))
    rig.state.chunks.end_call()
    chunk = rig.state.chunks.look_up(ChunkKey("chunk"))
    assert chunk is not None
    ids = [rig.state.leases.pin(chunk, COPIES).lease_id for _ in range(MANY)]
    call = asyncio.ensure_future(rig.call(rig.service.unpin, UnpinRequest(ids, 0, [], [])))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    async with asyncio.timeout(30):
        while len(rig.state.leases):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)
