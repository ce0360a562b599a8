"""Callers of gRPC, who know no owners: the leader of several masters asks the owners for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tanghulu.discovery.master import MasterDiscovery
from tanghulu.errors import ConfigError, InvalidRequest, KeysMoved, MasterUnavailable, Overloaded
from tanghulu.protos import directory_pb2 as pb
from tanghulu.rpc.fast_aio import AsyncFastConnection
from tanghulu.rpc.grpc_edge import typed_errors
from tanghulu.store.directory_feed import _KINDS as KINDS
from tanghulu.store.directory_feed import DirectoryEvent, DirectoryEventKind
from tanghulu.store.followed_ranges import EventCursor
from tanghulu.store.master.main import MasterConfig
from tanghulu.store.master.rpc import forwarding as forwarding_module
from tanghulu.store.master.rpc.forwarding import Numbering
from tanghulu.store.protocol.key_slots import ALL_RANGES, range_of
from tests.store.master.running_master import (
    FakeNode,
    SeveralMasters,
    ask_fast,
    directory_stub,
    instance,
    several_masters_here,
    until,
)

KEYS = [f"k{n}" for n in range(40)]
MISSING = [f"none{n}" for n in range(10)]
ASKED = [key for pair in zip(KEYS, MISSING * 4, strict=True) for key in pair]
K = DirectoryEventKind


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a call may take is for clients that have other masters to ask; these have not."""
    monkeypatch.setattr(forwarding_module, "CALL_S", 20.0)


@pytest.fixture
async def masters() -> AsyncIterator[SeveralMasters]:
    async with several_masters_here() as several:
        yield several


@pytest.fixture
async def nodes(masters: SeveralMasters) -> AsyncIterator[list[FakeNode]]:
    """One node, registered at both masters, which know of all KEYS in whatever range they come to own."""
    async with AsyncExitStack() as stack:
        made: list[FakeNode] = []
        for address, ownership in zip(masters.addresses, masters.ownerships, strict=True):
            discovery = await stack.enter_async_context(MasterDiscovery(address))
            registration = await discovery.register(instance())
            stack.push_async_callback(registration.close)
            made.append(await FakeNode.connect(address, instance()))
            made[-1].map_version = 1
            stack.push_async_callback(made[-1].connection.close)
            owned, ownership.owned = ownership.owned, ALL_RANGES
            await made[-1].report(*((key, 1, 10) for key in KEYS))
            ownership.owned = owned
        for node, ownership in zip(made, masters.ownerships, strict=True):
            mine = [key for key in MISSING if range_of(key) in ownership.owned]
            await until(lambda node=node, mine=mine: _knows_all(node, mine))
        yield made


async def _knows_all(node: FakeNode, keys: Sequence[str]) -> bool:
    return not (await node.holders(*keys))[1]


Ask = Callable[[str, Any], Awaitable[Any]]


@pytest.fixture
async def ask(masters: SeveralMasters, nodes: list[FakeNode]) -> AsyncIterator[Ask]:
    """Call a method of the leader over gRPC."""
    async with directory_stub(masters.addresses[0]) as stub:

        async def call(name: str, message: Any) -> Any:
            async with typed_errors("the leader", MasterUnavailable):
                return await getattr(stub, name)(message)

        yield call


async def test_the_owners_answers_come_as_one(ask: Ask, masters: SeveralMasters) -> None:
    found = await ask("Locate", pb.LocateRequest(keys=ASKED, count_only=True))
    assert found.found == bytes(key in KEYS for key in ASKED)
    assert not found.incomplete
    located = await ask("Locate", pb.LocateRequest(keys=ASKED))
    holders = [[located.node_ids[n] for n in each.nodes] for each in located.locations]
    assert holders == [["n1"] if key in KEYS else [] for key in ASKED]
    page = await ask("ListKeys", pb.ListKeysRequest(limit=7))
    assert ([info.key for info in page.keys], page.more) == (sorted(KEYS)[:7], True)
    rest = await ask("ListKeys", pb.ListKeysRequest(after=page.keys[-1].key))
    assert ([info.key for info in rest.keys], rest.more) == (sorted(KEYS)[7:], False)
    assert rest.term == masters.ownerships[0].map.version
    assert (await ask("Replicate", pb.ReplicateRequest(keys=KEYS, holders=2, for_s=5.0))).num_taken == len(KEYS)
    told = await ask("Nodes", pb.NodesRequest())
    assert [node.instance.id for node in told.nodes] == ["n1"]
    assert told.nodes[0].num_chunks == len(KEYS)
    assert not told.of_part


async def test_a_wait_ends_when_the_owner_of_the_last_key_has_it(
    ask: Ask, masters: SeveralMasters, nodes: list[FakeNode]
) -> None:
    at_once = await ask("Wait", pb.WaitRequest(keys=[*KEYS, MISSING[0]]))
    assert at_once.found == b"\1" * len(KEYS) + b"\0"
    late = next(key for key in MISSING if range_of(key) % 2)
    call = asyncio.ensure_future(ask("Wait", pb.WaitRequest(keys=[KEYS[0], late], deadline_ms=30_000)))
    done, _ = await asyncio.wait({call}, timeout=0.1)
    assert not done
    await nodes[1].announce((late, 1, 10))
    assert (await call).found == b"\1\1"


async def test_keys_that_change_hands_in_the_middle_of_a_call_are_asked_of_their_new_owner(
    ask: Ask, masters: SeveralMasters
) -> None:
    for owner_of in (lambda number: 1 - number % 2, lambda number: 1, lambda number: number % 2):
        masters.ownerships[1].on_asked = lambda owner_of=owner_of: masters.share(owner_of)  # type: ignore[misc]
        found = await ask("Locate", pb.LocateRequest(keys=ASKED, count_only=True))
        assert found.found == bytes(key in KEYS for key in ASKED)


async def test_keys_of_nobody_are_a_typed_error_that_every_version_knows(
    ask: Ask, masters: SeveralMasters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwarding_module, "CALL_S", 0.3)
    masters.share(lambda number: None if number % 2 else 0)
    with pytest.raises(MasterUnavailable, match="the owner of some keys") as raised:
        await ask("Locate", pb.LocateRequest(keys=ASKED, count_only=True))
    assert not isinstance(raised.value, KeysMoved)
    monkeypatch.setattr(forwarding_module, "CALL_S", 20.0)
    masters.share(lambda number: number % 2)
    assert 1 in (await ask("Locate", pb.LocateRequest(keys=ASKED, count_only=True))).found


# --- who is forwarded, and how much of it


async def test_callers_of_the_fast_lane_are_refused_what_others_own(masters: SeveralMasters, ask: Ask) -> None:
    connection = await AsyncFastConnection.connect(masters.addresses[0])
    with pytest.raises(KeysMoved):
        await ask_fast(connection, pb.LocateRequest(keys=ASKED))
    await connection.close()


@contextmanager
def bounds(monkeypatch: pytest.MonkeyPatch, **values: int) -> Iterator[None]:
    with monkeypatch.context() as patch:
        for name, value in values.items():
            patch.setattr(forwarding_module, name, value)
        yield


async def test_calls_under_way_and_their_bytes_are_bounded(
    ask: Ask, masters: SeveralMasters, nodes: list[FakeNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_owner = asyncio.Event()
    masters.ownerships[1].on_asked = at_owner.set
    late = next(key for key in MISSING if range_of(key) % 2)
    waiting = asyncio.ensure_future(ask("Wait", pb.WaitRequest(keys=[late], deadline_ms=30_000)))
    await at_owner.wait()
    asked = pb.LocateRequest(keys=ASKED, count_only=True)

    async def is_refused() -> bool:
        try:
            await ask("Locate", asked)
        except Overloaded:
            return True
        return False

    for bound in ({"MAX_CALLS": 1}, {"MAX_BYTES": 1000}):
        with bounds(monkeypatch, **bound):
            assert await is_refused()
        assert not await is_refused()
    with bounds(monkeypatch, MAX_BYTES=1):
        await nodes[1].announce((late, 1, 10))
        assert (await waiting).found == b"\1"
        assert not await is_refused(), "a single call is never too large"


async def test_events_of_all_owners_come_as_those_of_one_master(
    masters: SeveralMasters, nodes: list[FakeNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    held: set[str] = set()
    kinds: list[int] = []
    last = 0

    def take(batch: pb.EventBatch) -> None:
        nonlocal last
        assert not batch.first_sequence or batch.first_sequence == last + 1, "nothing is lost"
        for event in batch.events:
            kinds.append(event.kind)
            last = event.sequence
            if event.kind == pb.DirectoryEvent.STORED:
                held.update(event.keys)
            elif event.kind == pb.DirectoryEvent.REMOVED:
                held.difference_update(event.keys)
        assert not batch.first_sequence or batch.last_sequence == last

    async with directory_stub(masters.addresses[0]) as stub:
        stream = stub.Events(pb.EventsRequest(key_prefix="k"))
        async with asyncio.timeout(30.0):
            while pb.DirectoryEvent.SYNCED not in kinds:
                take(await stream.read())
            assert kinds[0] == pb.DirectoryEvent.RESET
            assert held == set(KEYS)
            for index, node in enumerate(nodes):
                key = next(f"k/{n}" for n in range(99) if range_of(f"k/{n}") % 2 == index)
                await node.announce((key, 1, 10))
                while key not in held:
                    take(await stream.read())
        with bounds(monkeypatch, MAX_STREAMS=1):
            with pytest.raises(Overloaded):
                async with typed_errors("the leader", MasterUnavailable):
                    await stub.Events(pb.EventsRequest()).read()
        stream.cancel()


def test_who_follows_goes_on_where_everything_begins_again() -> None:
    """A feed that remembers too few keys begins again when a range changes hands, in the middle of a batch, say."""

    def stored(*keys: str) -> DirectoryEvent:
        return DirectoryEvent(0, K.STORED, "n1", keys)

    reset, synced = DirectoryEvent(0, K.RESET), DirectoryEvent(0, K.SYNCED)
    numbering, cursor = Numbering(5), EventCursor()
    told: list[tuple[bool, DirectoryEventKind]] = []
    for events in ([reset, stored("a"), synced, stored("b")], [stored("c"), reset, stored("a")], [synced, stored("d")]):
        for batch in numbering.batches(events):
            taken = [DirectoryEvent(each.sequence, KINDS[each.kind]) for each in batch.events]
            assert cursor.take(batch.master_generation, taken, batch.first_sequence, batch.last_sequence)
            told += [(batch.first_sequence > 0, each.kind) for each in taken]
    snapshot, change = (False, K.STORED), (True, K.STORED)
    began, ended = (False, K.RESET), (False, K.SYNCED)
    assert told == [began, snapshot, ended, change, change, began, snapshot, ended, change]
    assert cursor.resumes_after == cursor.sequence > 0


async def test_an_error_of_the_request_is_the_callers(ask: Ask) -> None:
    with pytest.raises(InvalidRequest):
        await ask("Wait", pb.WaitRequest())
    with pytest.raises(InvalidRequest):
        await ask("Replicate", pb.ReplicateRequest(keys=KEYS, holders=2, for_s=-1.0))


def test_masters_with_tokens_have_one_to_show_to_each_other() -> None:
    with pytest.raises(ConfigError, match="needs --token"):
        MasterConfig(etcd="127.0.0.1:2379", tokens=Path("tokens.toml"))
    MasterConfig(etcd="127.0.0.1:2379", tokens=Path("tokens.toml"), token="tgh_x")
