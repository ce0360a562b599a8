"""Two masters that share the keys, and clients of both kinds: what they ask whom, also while keys change hands."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

import tanghulu
from tanghulu import aio
from tanghulu.discovery.master import MasterDiscovery
from tanghulu.errors import KeysMoved, MasterUnavailable
from tanghulu.store.client.aio import AsyncClient
from tanghulu.store.client.client import Client
from tanghulu.store.client.logic.commit import CommitCall, commit_by_client
from tanghulu.store.client.logic.effects import MASTER, PeerId, owner_peer
from tanghulu.store.protocol import methods
from tanghulu.store.protocol.announcements import NodeAnnouncement
from tanghulu.store.protocol.key_slots import ALL_RANGES, range_of
from tanghulu.store.protocol.terms import Term
from tanghulu.store.protocol.types import CommitResult, NewChunk
from tanghulu.types import ChunkKey
from tests.store.master.running_master import FakeNode, SeveralMasters, instance, several_masters_here
from tests.store.master.running_master import ask as ask_master

KEYS = [f"k{n}" for n in range(40)]
OF_FIRST = [key for key in KEYS if range_of(key) % 2 == 0]
MISSING = [f"none{n}" for n in range(10)]
DEADLINE_S = 30.0


@pytest.fixture
async def masters() -> AsyncIterator[SeveralMasters]:
    async with several_masters_here() as several:
        yield several


@pytest.fixture
async def nodes(masters: SeveralMasters) -> AsyncIterator[list[FakeNode]]:
    """One node, registered at both masters."""
    async with AsyncExitStack() as stack:
        made: list[FakeNode] = []
        for address in masters.addresses:
            discovery = await stack.enter_async_context(MasterDiscovery(address))
            registration = await discovery.register(instance())
            stack.push_async_callback(registration.close)
            made.append(await FakeNode.connect(address, instance()))
            made[-1].map_version = 1
            stack.push_async_callback(made[-1].connection.close)
        yield made


async def report(masters: SeveralMasters, nodes: Sequence[FakeNode], *keys_of: Sequence[str]) -> None:
    """Tell each master what it may be asked for, now or later."""
    for node, ownership, keys in zip(nodes, masters.ownerships, keys_of, strict=True):
        owned, ownership.owned = ownership.owned, ALL_RANGES
        await node.report(*((key, 1, 10) for key in keys))
        ownership.owned = owned


Ask = Callable[..., Awaitable[Any]]


@pytest.fixture(params=["blocking", "asyncio"])
async def ask(request: pytest.FixtureRequest, masters: SeveralMasters) -> AsyncIterator[Ask]:
    """Call a method of a client of the first master."""
    if request.param == "asyncio":
        async with aio.connect(str(masters.addresses[0])) as client:

            async def call(name: str, *args: Any, **how: Any) -> Any:
                return await getattr(client, name)(*args, **how)

            call.client = client  # type: ignore[attr-defined]
            yield call
        return
    blocking = await asyncio.to_thread(tanghulu.connect, str(masters.addresses[0]))

    async def call_in_thread(name: str, *args: Any, **how: Any) -> Any:
        return await asyncio.to_thread(getattr(blocking, name), *args, **how)

    call_in_thread.client = blocking  # type: ignore[attr-defined]
    yield call_in_thread
    await asyncio.to_thread(blocking.close)


def client_of(ask: Ask) -> Client | AsyncClient:
    client: Client | AsyncClient = ask.client  # type: ignore[attr-defined]
    return client


async def test_each_key_is_asked_of_its_owner(ask: Ask, masters: SeveralMasters, nodes: list[FakeNode]) -> None:
    await report(masters, nodes, OF_FIRST, [key for key in KEYS if key not in OF_FIRST])
    asked = [key for pair in zip(KEYS, MISSING * 4, strict=True) for key in pair]
    assert await ask("exists_many", asked, deadline_s=DEADLINE_S) == [key in KEYS for key in asked]
    assert await ask("match_prefix", [*KEYS, *MISSING], deadline_s=DEADLINE_S) == len(KEYS)
    listed = await ask("list_keys", deadline_s=DEADLINE_S)
    assert [info.key for info in listed] == sorted(KEYS)
    assert [info.key for info in await ask("list_keys", "k1", limit=7)] == sorted(k for k in KEYS if k[1] == "1")[:7]
    assert await ask("wait_for_many", KEYS, deadline_s=DEADLINE_S) == [True] * len(KEYS)
    assert await ask("replicate", KEYS, holders=2, for_s=5.0) == len(KEYS)
    owners = client_of(ask)._driver.context.masters.owners
    assert owners is not None
    assert owners.map == masters.ownerships[0].map


def swapped(number: int) -> int:
    return 1 - number % 2


CALLS: dict[str, tuple[Sequence[Any], Callable[[Any], Any]]] = {
    "exists_many": ([[*KEYS, *MISSING]], lambda found: found == [True] * len(KEYS) + [False] * len(MISSING)),
    "match_prefix": ([[*KEYS, *MISSING]], lambda matched: matched == len(KEYS)),
    "list_keys": ([], lambda listed: [info.key for info in listed] == sorted(KEYS)),
    "wait_for_many": ([KEYS], lambda found: found == [True] * len(KEYS)),
    "replicate": ([KEYS], lambda num_taken: num_taken == len(KEYS)),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("asked", [0, 1])
async def test_keys_that_change_hands_in_the_middle_of_a_call_are_asked_of_their_new_owner(
    ask: Ask, masters: SeveralMasters, nodes: list[FakeNode], name: str, asked: int
) -> None:
    await report(masters, nodes, KEYS, KEYS)
    args, is_right = CALLS[name]
    how = {"holders": 2, "for_s": 5.0} if name == "replicate" else {"deadline_s": DEADLINE_S}
    assert is_right(await ask(name, *args, **how))
    masters.ownerships[asked].on_asked = lambda: masters.share(swapped)
    assert is_right(await ask(name, *args, **how))
    masters.ownerships[asked].on_asked = lambda: masters.share(lambda number: 1)
    assert is_right(await ask(name, *args, **how))
    masters.share(lambda number: 0)
    assert is_right(await ask(name, *args, **how))
    owners = client_of(ask)._driver.context.masters.owners
    assert owners is not None
    assert owners.peers == {owner_peer(masters.addresses[0])}


async def test_who_is_asked_may_know_less_than_the_client(
    ask: Ask, masters: SeveralMasters, nodes: list[FakeNode]
) -> None:
    """The old owner has let go and has not heard who came after it; the leader hears last."""
    await report(masters, nodes, KEYS, KEYS)
    assert all(await ask("exists_many", KEYS, deadline_s=DEADLINE_S))
    known = masters.share(lambda number: 1, told=[])
    call = asyncio.ensure_future(ask("exists_many", KEYS, deadline_s=DEADLINE_S))
    done, _ = await asyncio.wait({call}, timeout=0.2)
    assert not done
    masters.ownerships[1].map = known
    done, _ = await asyncio.wait({call}, timeout=0.2)
    masters.ownerships[0].map = known
    assert all(await call)


async def test_keys_of_nobody_are_a_typed_error_at_the_deadline_and_found_when_they_have_an_owner(
    ask: Ask, masters: SeveralMasters, nodes: list[FakeNode]
) -> None:
    await report(masters, nodes, KEYS, KEYS)
    masters.share(lambda number: None if number % 2 else 0)
    with pytest.raises(MasterUnavailable):
        await ask("exists_many", KEYS, deadline_s=0.3)
    assert all(await ask("exists_many", OF_FIRST, deadline_s=DEADLINE_S))
    with pytest.raises(MasterUnavailable):
        await ask("wait_for_many", KEYS, deadline_s=0.3)
    call = asyncio.ensure_future(ask("exists_many", KEYS, deadline_s=DEADLINE_S))
    await asyncio.wait({call}, timeout=0.1)
    masters.share(lambda number: number % 2)
    assert all(await call)


async def test_a_wait_goes_on_at_the_new_owner(ask: Ask, masters: SeveralMasters, nodes: list[FakeNode]) -> None:
    await report(masters, nodes, [], [])
    (key,) = OF_FIRST[:1]
    call = asyncio.ensure_future(ask("wait_for", key, deadline_s=DEADLINE_S))
    await asyncio.wait({call}, timeout=0.2)
    masters.share(swapped)
    await nodes[1].announce((key, 1, 10))
    assert await call


def new(key: str) -> NewChunk:
    return NewChunk(ChunkKey(key), 7, 100)


async def test_a_client_commits_each_key_at_its_owner(masters: SeveralMasters, nodes: list[FakeNode]) -> None:
    await report(masters, nodes, [], [])
    node = PeerId("n1")
    async with aio.connect(str(masters.addresses[0])) as client:
        context, driver = client._driver.context, client._driver
        other = next(key for key in KEYS if key not in OF_FIRST)
        keys = [OF_FIRST[0], other, OF_FIRST[1]]
        news = [new(key) for key in keys]

        async def commit(items: Sequence[NewChunk]) -> list[CommitResult]:
            deadline = client._driver.deadline(DEADLINE_S)
            return await driver.run(commit_by_client(context, deadline, node, 7, items), deadline)

        assert not any(await client.exists_many(KEYS, deadline_s=DEADLINE_S)), "both masters know what there is"
        context.masters.owners = None
        assert [peer for peer, _ in CommitCall(context, node, 7, news).calls] == [MASTER]
        assert await commit(news) == [CommitResult.ASK_NODE] * 3, "one master was asked for all of them"
        assert [peer for peer, _ in CommitCall(context, node, 7, news).calls] == [
            owner_peer(address) for address in masters.addresses
        ]
        assert await commit(news) == [CommitResult.ACCEPTED] * 3
        assert await client.exists_many(keys) == [True] * 3
        masters.ownerships[1].on_asked = lambda: masters.share(lambda number: 0)
        assert await commit([new("k39"), *map(new, ("k38", "k37", "k36"))]) != [CommitResult.ACCEPTED] * 4
        assert context.masters.owners is not None
        assert context.masters.owners.peers == {owner_peer(masters.addresses[0])}
        again = [NewChunk(ChunkKey(f"again{n}"), 9, 100) for n in range(4)]
        assert await commit(again) == [CommitResult.ACCEPTED] * 4
        known = context.masters.owners.map
        for newest, result in ((known.version, CommitResult.ACCEPTED), (known.version + 1, CommitResult.ASK_NODE)):
            index = SimpleNamespace(term=Term(newest, known.cluster))
            context.mapped[node] = SimpleNamespace(index=index)  # type: ignore[assignment]
            assert await commit([new(f"told{newest}")]) == [result], "the node may have told a later owner what it has"
        context.mapped.clear()


async def test_a_node_learns_that_a_range_has_come_back_before_it_is_heard(
    masters: SeveralMasters, nodes: list[FakeNode]
) -> None:
    known = masters.ownerships[0].map
    node = nodes[0].instance
    request = NodeAnnouncement(node.id, node.generation, map_version=known.version, owned=1)
    for number in (known.term_of(0) - 1, known.term_of(0)):
        announcement = structs.replace(request, term=Term(number, known.cluster))
        calling = ask_master(nodes[0].connection, methods.ANNOUNCE, announcement)
        if number < known.term_of(0):
            with pytest.raises(KeysMoved):
                await calling
        else:
            assert (await calling).signature.term.number == known.version
