"""Tenants with real processes: who gets in, who sees what, on both carriers."""

from __future__ import annotations

import asyncio
import json
import stat
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

import pytest
from click.testing import CliRunner

import tanghulu
from tanghulu import aio
from tanghulu.auth.certificate_roles import MASTER
from tanghulu.auth.credentials import Credentials
from tanghulu.cli.status import COMMAND as STATUS
from tanghulu.cli.store import COMMAND as STORE
from tanghulu.discovery.base import EventKind
from tanghulu.discovery.instance_wire import InstanceEntry
from tanghulu.discovery.membership import (
    DEREGISTER,
    REGISTER,
    WATCH,
    LeaseRequest,
    RegisterRequest,
    WatchReply,
    WatchRequest,
)
from tanghulu.errors import ChunkNotFound, Conflict, Forbidden, InvalidRequest, TanghuluError, Unauthorized
from tanghulu.masters import Masters
from tanghulu.rpc import greeting
from tanghulu.rpc.fast_aio import AsyncFastConnection
from tanghulu.rpc.fast_client import Call, FastConnection
from tanghulu.rpc.greeting import greet
from tanghulu.rpc.streams import receive_all
from tanghulu.store.client.client import Client
from tanghulu.store.client.logic import messages
from tanghulu.store.directory_feed import DirectoryEventKind, follow_directory
from tanghulu.store.protocol.announcements import NodeAnnouncement
from tanghulu.store.protocol.checksums import NO_CHECKSUMS
from tanghulu.store.protocol.directory_messages import ListKeysRequest, NodesRequest, PlaceRequest
from tanghulu.store.protocol.messages import CommitItem, CommitRequest, KeysRequest, ReserveRequest
from tanghulu.store.protocol.methods import ANNOUNCE, CHUNK_STAT, COMMIT, LIST_KEYS, NODES, PLACE, RESERVE
from tanghulu.store.protocol.types import NewChunk
from tanghulu.types import Address
from tests.store.cluster import Process
from tests.store.guarded_cluster import TOKENS, Secured, write_tokens


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    file = tmp_path_factory.mktemp("tokens") / "tokens.toml"
    write_tokens(file, list(TOKENS))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with Secured(file, num_nodes=2) as running:
        yield running


def test_tenants_do_not_see_each_other(cluster: Secured) -> None:
    """The same keys, small and large, over shared memory and over TCP."""
    with cluster.connect("acme") as acme, cluster.connect("initech") as initech, cluster.connect("operator") as all_:
        for size in (10, 3 << 20):
            key = f"doc-{size}"
            assert not acme.put(key, b"a" * size).existed
            assert not initech.exists(key)
            with pytest.raises(ChunkNotFound):
                initech.get(key)
            assert not initech.remove(key)
            assert not initech.put(key, b"i" * size).existed
            assert acme.get(key).bytes() == b"a" * size
            assert initech.get(key).bytes() == b"i" * size
            assert initech.stat(key).size_bytes == size
            with pytest.raises(ChunkNotFound):
                initech.get(f"@acme/{key}")
            assert all_.get(f"@acme/{key}").bytes() == b"a" * size
        assert [info.key for info in acme.list_keys()] == ["doc-10", f"doc-{3 << 20}"]
        assert [info.key for info in acme.list_keys(after="doc-10")] == [f"doc-{3 << 20}"]
        assert [info.key for info in initech.list_keys("doc-1")] == ["doc-10"]
        assert {info.key.partition("/")[0] for info in all_.list_keys()} == {"@acme", "@initech"}
        assert initech.match_prefix(["doc-10", "other"]) == 1
        assert initech.remove_matching("doc") == 2
        assert acme.exists_many(["doc-10", f"doc-{3 << 20}"]) == [True, True]
        assert all_.remove_matching("^@acme/") == 2
        assert not acme.exists("doc-10")


def test_operators_may_act_for_a_tenant(cluster: Secured) -> None:
    with cluster.connect("operator", tenant="initech") as initech, cluster.connect("initech") as own:
        initech.put("by-operator", b"x")
        assert own.get("by-operator").bytes() == b"x"
        assert own.remove("by-operator")


def test_what_a_token_does_not_allow(cluster: Secured) -> None:
    with cluster.connect("acme-reader") as reader, cluster.connect("acme-writer") as writer:
        assert writer.put("guarded", b"1").ok
        assert reader.get("guarded").bytes() == b"1"
        with pytest.raises(Forbidden, match="'write'"):
            reader.put("more", b"2")
        with pytest.raises(Forbidden, match="'write'"):
            reader.remove("guarded")
        refused = CliRunner().invoke(
            STORE, ["rm", "guarded", "--master", cluster.address, "--token", "secret-acme-reader"]
        )
        assert isinstance(refused.exception, Forbidden), "not: it is not there"
        with pytest.raises(Forbidden, match="'read'"):
            writer.exists("guarded")
        node = reader.nodes()[0].id
        for forbidden in (
            lambda: reader.drain(node),
            lambda: reader.evict(node, num_bytes=1),
            lambda: reader.verify(node),
            lambda: reader.eviction_policy(node, "fifo"),
        ):
            with pytest.raises(Forbidden, match="'admin'"):
                forbidden()
        assert reader.eviction_policy(node) == "reuse"
        assert writer.remove("guarded")


KV_KEYS = ["kv/0011223344556677/00/0", "lmcache/model/00@0@0@model", "sgl/00/00"]


@pytest.mark.parametrize(
    ("name", "key"),
    [(name, key) for name in ("acme", "initech", "plain") for key in KV_KEYS] + [("plain", "@acme/kv/1")],
)
def test_who_only_writes_puts_and_removes_no_kv(cluster: Secured, name: str, key: str) -> None:
    """By every way into a node: acme's memory is mapped and initech's is not; engines load what lies there."""
    with cluster.connect("worker") as worker, cluster.connect(name) as client:
        stored = key if name == "plain" else f"@{name}/{key}"
        assert worker.put(stored, b"true").ok
        with pytest.raises(Forbidden, match="'kv'"):
            client.remove(key)
        assert worker.remove(stored)
        for size in (10, 100 << 10, 3 << 20):
            for value in (b"f" * size, [b"f", b"f" * (size - 1)]):
                with pytest.raises(Forbidden, match="'kv'"):
                    client.put(key, value)
            many = client.put_many([("beside", b"1"), (key, b"f" * size)])
            assert isinstance(many[1].error, Forbidden)
            assert not worker.exists(stored)
        client.remove("beside")


def test_who_has_the_right_puts_and_removes_kv(cluster: Secured) -> None:
    with cluster.connect("acme-kv") as client, cluster.connect("worker") as worker:
        for key in KV_KEYS:
            for size in (10, 100 << 10, 3 << 20):
                assert client.put(key, b"1" * size).ok
                assert client.remove(key)
        assert worker.put(KV_KEYS[0], b"1").ok
        assert worker.remove(KV_KEYS[0])


@pytest.mark.parametrize(
    ("tenant", "token", "said"),
    [
        ("", "", "requires a token"),
        ("", "guess", "unknown"),
        ("initech", "secret-acme", "does not belong to tenant"),
        ("nobody", "secret-operator", "is unknown"),
    ],
)
def test_who_is_not_known_is_not_let_in(cluster: Secured, tenant: str, token: str, said: str) -> None:
    with pytest.raises(Unauthorized, match=said):
        tanghulu.connect(cluster.address, tenant=tenant, token=token)


async def test_asyncio_and_events(cluster: Secured) -> None:
    """A follower hears of its own tenant's chunks only, under its own names."""
    acme = Masters.parse(cluster.address).showing(Credentials("", "secret-acme"))
    heard: set[str] = set()  # a key of the snapshot may come once more as a change
    done = asyncio.Event()

    async def follow() -> None:
        async for batch in follow_directory(acme, "ev/"):
            for event in batch:
                if event.kind is DirectoryEventKind.STORED:
                    heard.update(event.keys)
            if "ev/last" in heard:
                done.set()
                return

    follower = asyncio.create_task(follow())
    async with (
        aio.connect(cluster.address, token="secret-acme") as mine,
        aio.connect(cluster.address, token="secret-initech", transport="tcp") as other,
    ):
        await mine.put("ev/first", b"1")
        await other.put("ev/other", b"2" * (2 << 20))
        assert (await other.get("ev/other")).bytes() == b"2" * (2 << 20)
        await mine.put("ev/last", b"3")
        async with asyncio.timeout(30):
            await done.wait()
        await follower
        assert sorted(heard) == ["ev/first", "ev/last"]
        assert await mine.remove_many(["ev/first", "ev/last"]) == [True, True]
        assert await other.remove("ev/other")


NODE = InstanceEntry("node-of-acme", "node", "127.0.0.1:1")


async def _ask(address: str, call: Call[Any], token: str) -> Any:
    """One call on the fast lane as another program makes it."""
    connection = await AsyncFastConnection.connect(Address.parse(address))
    try:
        await greet(connection, Credentials("", token), 30.0)
        return (await connection.call(call.method, call.request, call.reply_type, deadline_s=30.0)).message
    finally:
        await connection.close()


async def test_callers_without_our_client(cluster: Secured) -> None:
    master = cluster.address
    with cluster.connect("acme") as acme:
        assert acme.put("third", b"abc").ok
    listing = LIST_KEYS.call(ListKeysRequest("th"))
    with pytest.raises(Unauthorized, match="requires a token"):
        await _ask(master, listing, "")
    with pytest.raises(Forbidden, match="'read'"):
        await _ask(master, listing, "secret-acme-writer")
    with pytest.raises(Forbidden, match="'join'"):
        await _ask(master, ANNOUNCE.call(NodeAnnouncement("x", 1)), "secret-acme")
    assert [info.key for info in (await _ask(master, listing, "secret-acme")).keys] == ["third"]
    assert not (await _ask(master, listing, "secret-initech")).keys
    with cluster.connect("operator") as operator:
        assert operator.remove("@acme/third")


async def test_a_tenant_is_no_instance(cluster: Secured) -> None:
    connection = await _greeted(cluster.address, "secret-acme")
    for call in (REGISTER.call(RegisterRequest(NODE, 1000)), DEREGISTER.call(LeaseRequest(1, "x"))):
        with pytest.raises(Forbidden, match="'join'"):
            await connection.call(call.method, call.request, call.reply_type)
    await connection.close()


async def test_nobody_takes_the_place_of_a_node(cluster: Secured) -> None:
    """Not even an operator, whose token is another than the node's; and clients do not see who there is."""
    with cluster.connect("acme") as acme:
        acme.put("stays", b"x")
        seen = [event.entry.id async for event in _watch(cluster.address, "secret-node") if event.entry is not None]
        assert {node.name for node in cluster.nodes} <= set(seen)
        assert [event.kind async for event in _watch(cluster.address, "secret-acme")] == [EventKind.SYNCED]
        for component, said in (("decode", "is a node and cannot register as a decode"), ("node", "another token")):
            with pytest.raises(Conflict, match=said):
                await _register(cluster.address, InstanceEntry(seen[0], component, "h:1"))
        fake = InstanceEntry("new", "decode", "h:1", metrics_address="http://h:1/x?y=")
        with pytest.raises(InvalidRequest, match="metrics_address"):
            await _register(cluster.address, fake)
        assert acme.exists("stays")
        assert acme.remove("stays")


def test_a_tenant_does_not_count_what_others_hold(cluster: Secured) -> None:
    with cluster.connect("acme") as acme, cluster.connect("initech") as initech, cluster.connect("operator") as all_:
        acme.put_many([(f"counted-{number}", b"x" * 1000) for number in range(10)])
        until_s = time.monotonic() + 60
        while sum(view.num_chunks for view in all_.nodes()) < 10 and time.monotonic() < until_s:
            time.sleep(0.05)
        assert sum(view.num_chunks for view in all_.nodes()) >= 10
        seen = initech.nodes()
        assert {view.num_chunks + view.used_bytes for view in seen} == {0}
        assert all(view.capacity_bytes for view in seen)
        calls = (PLACE.call(PlaceRequest(1)), NODES.call(NodesRequest()), NODES.call(NodesRequest(versioned=True)))
        counted = [asyncio.run(_ask(cluster.address, call, "secret-initech")) for call in calls]
        assert {node.num_chunks + node.used_bytes for reply in counted for node in reply.nodes} == {0}
        assert counted[1].num_keys == counted[2].num_keys == 0
        assert acme.remove_matching("^counted-") == 10


def test_status_shows_a_tenant_the_nodes(cluster: Secured) -> None:
    options = ["--master", cluster.address, "--token", "secret-initech", "--json"]
    shown = CliRunner().invoke(STATUS, options, catch_exceptions=False)
    status = json.loads(shown.stdout)
    assert [part["role"] for part in status["parts"]] == ["master", "node", "node"]
    assert {part["health"] for part in status["parts"]} == {"up"}
    assert status["problems"] == []
    assert shown.exit_code == 0


async def _greeted(address: str, token: str) -> AsyncFastConnection:
    return await greeting.connect(Address.parse(address), Credentials("", token), MASTER, 10.0)


async def _watch(address: str, token: str) -> AsyncIterator[WatchReply]:
    connection = await _greeted(address, token)
    async with aclosing(receive_all(connection, WATCH.call(WatchRequest()))) as events:
        async for event in events:
            yield event
            if event.kind is EventKind.SYNCED:
                return


async def _register(address: str, entry: InstanceEntry) -> None:
    connection = await _greeted(address, "secret-operator")
    try:
        await connection.call(REGISTER.number, RegisterRequest(entry, 60_000), REGISTER.reply)
    finally:
        await connection.close()


def test_only_trusted_tenants_map_memory(cluster: Secured) -> None:
    """What one tenant left behind is not found by another in the range it reserves and never writes."""
    with cluster.connect("acme") as acme, cluster.connect("initech") as initech:
        acme.put("mapped", b"secret " * (1 << 19))
        with acme.get("mapped") as chunk:
            assert chunk.bytes()[:6] == b"secret"
        assert acme._driver.context.mapped, "a trusted tenant reads by the shared index"
        initech.put("x", b"1")
        initech.get("x")
        assert not initech._driver.context.mapped
        assert acme.remove("mapped")
        assert initech.remove("x")
    node = cluster.nodes[0]
    connection = FastConnection(Address.parse(node.address))
    call = messages.hello("me", Credentials("", "secret-initech"), "", False, ())
    connection.call(call.method, call.request, call.reply_type)
    new = NewChunk("stolen", 1, 4 << 20)  # type: ignore[arg-type]
    for call in (RESERVE.call(ReserveRequest([new], 1000)),):
        (reservation,) = messages.reservations(connection.call(call.method, call.request, call.reply_type))
    assert not isinstance(reservation, TanghuluError)
    assert reservation is not None
    call = COMMIT.call(CommitRequest([CommitItem(reservation.lease_id, NO_CHECKSUMS)], [], True, 1000))
    connection.call(call.method, call.request, call.reply_type)
    connection.close()
    with cluster.connect("initech") as initech:
        assert initech.get("stolen").bytes() == bytes(4 << 20)
        assert initech.remove("stolen")


def test_a_call_without_hello_is_refused(cluster: Secured) -> None:
    for address in (cluster.address, cluster.nodes[0].address):
        connection = FastConnection(Address.parse(address))
        call = NODES.call(NodesRequest()) if address == cluster.address else CHUNK_STAT.call(KeysRequest(["doc"]))
        with pytest.raises(Unauthorized, match="HELLO"):
            connection.call(call.method, call.request, call.reply_type)
        connection.close()


def test_a_tenant_stays_within_its_quota(cluster: Secured) -> None:
    with cluster.connect("acme") as acme, cluster.connect("initech") as initech, cluster.connect("operator") as all_:
        acme.put("kept", b"k" * (1 << 20))
        node = acme.stat("kept").nodes[0]
        for number in range(40):
            assert initech.put(f"flood-{number}", b"f" * (1 << 20), prefer_node=node).ok
        for number in range(24):
            assert initech.put(f"small-{number}", b"s" * (1 << 10), prefer_node=node).ok
        many = [(f"many-{number}", b"m" * (1 << 20)) for number in range(40)]
        assert [status.error for status in initech.put_many(many, prefer_node=node)] == [None] * 40
        (mine,) = initech.tenants()
        assert mine.tenant == "initech"
        assert 7 << 20 < mine.used_bytes <= 2 * mine.quota_bytes == 16 << 20
        assert mine.evictions >= 32
        assert acme.get("kept").bytes() == b"k" * (1 << 20)
        by_name = {each.tenant: each for each in all_.tenants()}
        assert {"acme", "initech"} <= set(by_name)
        assert by_name["acme"].used_bytes == 1 << 20
        with pytest.raises(InvalidRequest, match="more than tenant 'initech' may hold"):
            initech.put("large", bytes(9 << 20))
        process = next(each for each in cluster.nodes if each.name == node)
        assert 0 < process.metric("tanghulu_node_tenant_used_bytes", tenant="initech") <= 8 << 20
        assert initech.remove_matching("^") > 0
        assert acme.remove("kept")
    shown = CliRunner().invoke(
        STORE, ["tenants", "--master", cluster.address, "--token", "secret-operator", "--json"], catch_exceptions=False
    )
    assert {"acme", "initech"} <= {row["tenant"] for row in json.loads(shown.stdout)}


def test_nodes_copy_chunks_of_all_tenants(cluster: Secured) -> None:
    with cluster.connect("acme") as acme, cluster.connect("operator") as operator:
        acme.put("moved", b"m" * (2 << 20))
        (holder,) = acme.stat("moved").nodes
        operator.drain(holder)
        until_s = time.monotonic() + 60
        while not any(view.drained for view in operator.nodes()) and time.monotonic() < until_s:
            operator.verify(holder)
        assert holder not in acme.stat("moved").nodes or len(acme.stat("moved").nodes) == 2
        operator.drain(holder, draining=False)
        assert acme.get("moved").bytes() == b"m" * (2 << 20)
        assert acme.remove("moved")


def test_a_revoked_token_loses_its_connections(cluster: Secured) -> None:
    with cluster.connect("temporary") as temporary, cluster.connect("acme") as acme:
        assert not temporary.exists("kept")
        write_tokens(cluster.file, [name for name in TOKENS if name != "temporary"])
        with pytest.raises(Unauthorized):
            ask_for(60.0, temporary)
        with pytest.raises(Unauthorized, match="unknown"):
            cluster.connect("temporary")
        assert not acme.exists("kept")


def ask_for(seconds: float, client: Client) -> None:
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        client.exists("kept")


def test_a_node_without_a_token_does_not_start(cluster: Secured) -> None:
    with pytest.raises(AssertionError, match="requires a token"):
        Process("tanghulu.store.node.main", "--port", "0", "--master", cluster.address, "--memory", "16MiB")
