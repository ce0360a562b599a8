"""The edges of a real master in this process: calls, event streams, metrics."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import generate_latest

from tanghulu.discovery.base import HOLDS_NOTHING
from tanghulu.discovery.master import MasterDiscovery
from tanghulu.errors import InvalidRequest, LeaseExpired, NodeUnavailable, StoreFull
from tanghulu.rpc.methods import Method
from tanghulu.store.protocol import methods
from tanghulu.store.protocol.announcements import ChunkEntry, NodeAnnouncement
from tanghulu.store.protocol.directory_messages import ListKeysRequest, NodesRequest, PlaceRequest
from tanghulu.store.protocol.messages import LocateRequest
from tanghulu.types import Address, Role
from tests.open_connections import OpenConnections
from tests.store.master.running_master import (
    FakeNode,
    InProcess,
    K,
    asking,
    following,
    instance,
    master_here,
    until,
)


@pytest.fixture
async def master() -> AsyncIterator[InProcess]:
    async with master_here() as process:
        yield process


@pytest.fixture
async def address(master: InProcess) -> Address:
    return await master.address


@pytest.fixture
async def discovery(address: Address) -> AsyncIterator[MasterDiscovery]:
    async with MasterDiscovery(address) as made:
        yield made


@asynccontextmanager
async def node(
    address: Address, discovery: MasterDiscovery, name: str = "n1", **values: Any
) -> AsyncIterator[FakeNode]:
    registration = await discovery.register(instance(name))
    made = await FakeNode.connect(address, instance(name))
    yield made
    await made.connection.close()
    await registration.close()


Ask = Callable[[Method[Any, Any], Any], Awaitable[Any]]


@pytest.fixture
async def ask(address: Address) -> AsyncIterator[Ask]:
    async with asking(address) as call:
        yield call


async def test_a_node_registers_reports_and_is_found(
    ask: Ask, master: InProcess, address: Address, discovery: MasterDiscovery
) -> None:
    async with node(address, discovery, "n1") as n1, node(address, discovery, "n2") as n2:
        assert (await n1.announce()).report_wanted
        assert list((await n1.report(("kv/a", 2**64 - 1, 100), ("kv/b", 1, 200))).accepted) == []
        assert not (await n1.announce()).report_wanted
        await n2.report(("kv/a", 2**64 - 1, 100))
        await until(lambda: is_complete(master))
        reply = await ask(methods.LOCATE, LocateRequest(["kv/a", "none", "kv/b"], count_only=False))
        assert not reply.incomplete
        where = [None if each is None else sorted(each.node_ids) for each in reply.locations]
        assert where == [["n1", "n2"], None, ["n1"]]
        found = [(each.version, each.size_bytes) for each in reply.locations if each is not None]
        assert found == [(2**64 - 1, 100), (1, 200)]
        brief = await ask(methods.LOCATE, LocateRequest(["none", "kv/b", "kv/a"], count_only=True))
        assert (brief.found, len(brief.locations)) == (b"\0\1\1", 0)
        nodes = await ask(methods.NODES, NodesRequest())
        assert [(n.id, n.num_chunks) for n in nodes.nodes] == [("n1", 2), ("n2", 1)]
        assert (nodes.num_keys, nodes.rebuilding) == (2, False)
        assert 0 <= nodes.nodes[0].last_seen_s < 5
        listing = await ask(methods.LIST_KEYS, ListKeysRequest(prefix="kv/", limit=1))
        assert (listing.keys[0].key, listing.keys[0].size_bytes, listing.more) == ("kv/a", 100, True)
        listing = await ask(methods.LIST_KEYS, ListKeysRequest(prefix="kv/", after="kv/a"))
        assert ([k.key for k in listing.keys], listing.more) == (["kv/b"], False)
        placed = await ask(methods.PLACE, PlaceRequest(size_bytes=10, prefer_node="n2"))
        assert [n.id for n in placed.nodes] == ["n2", "n1"]
        placed = await ask(methods.PLACE, PlaceRequest(size_bytes=10, client_place="z/r/host-n1"))
        assert placed.nodes[0].id == "n1"


async def test_the_first_put_wins(ask: Ask, address: Address, discovery: MasterDiscovery) -> None:
    async with node(address, discovery, "n1") as n1, node(address, discovery, "n2") as n2:
        assert list((await n1.announce(("k", 1, 5), ("l", 1, 5))).accepted) == [True, True]
        assert list((await n2.announce(("k", 2, 5), ("m", 2, 5))).accepted) == [False, True]
        assert list((await n1.announce(deleted=[("k", 1)])).accepted) == []
        assert list((await n2.announce(("k", 1, 5))).accepted) == [False], "a tombstone"
        assert (await n1.holders("k", "l"))[0] == [[], ["n1"]]


async def test_typed_errors(ask: Ask, address: Address, discovery: MasterDiscovery) -> None:
    with pytest.raises(NodeUnavailable, match="no store node"):
        await ask(methods.PLACE, PlaceRequest(size_bytes=1))
    with pytest.raises(LeaseExpired, match="register, then announce"):
        await ask(methods.ANNOUNCE, NodeAnnouncement("n1", 7))
    async with node(address, discovery) as n1:
        with pytest.raises(InvalidRequest, match="another process took its place"):
            await ask(methods.ANNOUNCE, NodeAnnouncement("n1", 6))
        with pytest.raises(StoreFull, match="none of 1 nodes accepts"):
            await ask(methods.PLACE, PlaceRequest(size_bytes=1))
        await n1.announce(capacity=100)
        with pytest.raises(StoreFull, match="none of 1 nodes accepts"):
            await ask(methods.PLACE, PlaceRequest(size_bytes=101))
        with pytest.raises(InvalidRequest, match="zone/rack/host"):
            await ask(methods.PLACE, PlaceRequest(size_bytes=1, client_place="nowhere"))
        for chunk in (("", 1, 1), ("k" * 2000, 1, 1), ("k", 1, 1 << 41)):
            with pytest.raises(InvalidRequest):
                await ask(methods.ANNOUNCE, NodeAnnouncement("n1", 7, [ChunkEntry(*chunk)]))
        with pytest.raises(InvalidRequest, match="send them in several"):
            await ask(methods.LOCATE, LocateRequest([""] * 70_000, count_only=False))


async def test_a_draining_node_gets_nothing_new(address: Address, discovery: MasterDiscovery) -> None:
    registration = await discovery.register(instance("n1"))
    n1 = await FakeNode.connect(address, instance("n1"))
    await n1.announce()
    async with asking(address) as ask:
        assert len((await ask(methods.PLACE, PlaceRequest(1))).nodes) == 1
        await registration.update(instance("n1", attributes={"draining": "true"}))
        assert (await ask(methods.NODES, NodesRequest())).nodes[0].draining
        with pytest.raises(StoreFull):
            await ask(methods.PLACE, PlaceRequest(size_bytes=1))
    await n1.connection.close()


async def test_followers_get_a_snapshot_then_changes(address: Address, discovery: MasterDiscovery) -> None:
    async with node(address, discovery, "n1") as n1, node(address, discovery, "n2") as n2:
        await n1.report(*((f"kv/{n:05}", 1, 1) for n in range(5000)))
        await n2.report(("kv/00000", 1, 1), ("other", 1, 1))
        async with following(address) as everything, following(address, "kv/") as some:
            await until(lambda: K.SYNCED in everything.kinds and K.SYNCED in some.kinds)
            assert everything.kinds[0] is K.RESET
            assert some.kinds[0] is K.RESET
            assert len(everything.pairs) == 5002
            assert len(some.pairs) == 5001
            await n2.announce(("other2", 1, 1))  # makes the filtered follower's sequence jump
            await n1.announce(("kv/new", 1, 1), removed=[("kv/00001", 1)])
            await until(lambda: ("n1", "kv/new") in everything.pairs and ("n1", "kv/new") in some.pairs)
            assert ("n1", "kv/00001") not in everything.pairs | some.pairs
            await n1.report(("kv/new", 1, 1))
            await until(lambda: some.pairs == {("n1", "kv/new"), ("n2", "kv/00000")})
            assert some.kinds.count(K.RESET) == 1
    assert K.NODE_GONE not in some.kinds


async def test_a_node_that_dies_is_gone_for_followers_at_its_leases_end(
    address: Address, discovery: MasterDiscovery
) -> None:
    async with following(address) as mirror:
        dying = MasterDiscovery(address)
        registration = await dying.register(instance("n1"), ttl_s=1.0)
        n1 = await FakeNode.connect(address, instance("n1"))
        await n1.report(("k", 1, 1))
        await until(lambda: ("n1", "k") in mirror.pairs)
        assert registration._renewing is not None
        registration._renewing.cancel()  # what a killed process does
        await until(lambda: K.NODE_GONE in mirror.kinds)
        assert mirror.pairs == set()
        assert await n1.holders("k") == ([[]], False)
        with pytest.raises(LeaseExpired):
            await n1.announce()
        await n1.connection.close()
        await dying.__aexit__(None, None, None)


async def test_who_comes_back_has_yet_to_tell_what_it_holds_and_who_is_new_and_holds_nothing_has_told_it(
    master: InProcess, address: Address, discovery: MasterDiscovery
) -> None:
    new = instance("n2", attributes={HOLDS_NOTHING: "true"})
    async with node(address, discovery) as n1:
        await n1.report(("known", 1, 1))
        await until(lambda: is_complete(master))
        registration = await discovery.register(new, ttl_s=0.6)
        assert await n1.holders("k") == ([[]], False)
        await until(lambda: registration._entered == new.again())
        assert await n1.holders("k") == ([[]], False), "no more is told by a renewal"
        await registration.close()
        await discovery.register(new)
        assert await n1.holders("k", "known") == ([[], ["n1"]], True), "that it holds nothing is told once"
        n2 = await FakeNode.connect(address, new)
        await n2.report(("k", 1, 1))
        assert await n1.holders("k", "none") == ([["n2"], []], False)
        await n2.connection.close()


class Proxy:
    """A TCP hop that can be cut."""

    def __init__(self, target: Address) -> None:
        self._target = target
        self._open = OpenConnections()
        self.connections = 0

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._open.served_by(self._serve), "127.0.0.1", 0)
        self.address = Address("127.0.0.1", self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._open.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        back_reader, back_writer = await asyncio.open_connection(self._target.host, self._target.port)

        async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while data := await source.read(65536):
                    sink.write(data)
            sink.close()

        try:
            await asyncio.gather(copy(reader, back_writer), copy(back_reader, writer))
        finally:
            back_writer.transport.abort()

    def cut(self) -> None:
        self._open.abort()


async def test_a_follower_goes_on_where_it_was_cut_off(address: Address, discovery: MasterDiscovery) -> None:
    async with node(address, discovery) as n1, Proxy(address) as proxy, following(proxy.address) as mirror:
        await n1.report(("a", 1, 1))
        await until(lambda: K.SYNCED in mirror.kinds)
        for number in range(5):
            proxy.cut()
            await n1.announce((f"missed {number}", 1, 1))
            await until(lambda number=number: ("n1", f"missed {number}") in mirror.pairs)
        assert proxy.connections > 5
        assert mirror.kinds.count(K.RESET) == 1


def is_complete(master: InProcess) -> bool:
    return "tanghulu_master_rebuilding 0.0" in generate_latest(master.registry).decode()


async def test_metrics_tell_what_happened(master: InProcess, address: Address, discovery: MasterDiscovery) -> None:
    await discovery.register(instance("w", Role.BOTH))
    async with node(address, discovery) as n1:
        await n1.report(("k", 1, 1))
        await n1.holders("k", "none")
        await until(lambda: is_complete(master))
        text = generate_latest(master.registry).decode()
    for line in (
        "tanghulu_master_keys 1.0",
        "tanghulu_master_nodes 1.0",
        'tanghulu_master_instances{component="worker"} 1.0',
        'tanghulu_master_announced_chunks_total{outcome="reported"} 1.0',
        'tanghulu_master_located_keys_total{outcome="found"} 1.0',
        'tanghulu_master_located_keys_total{outcome="missing"} 1.0',
        'tanghulu_master_announcements_total{report="piece"} 2.0',
    ):
        assert line in text, line
