"""A cluster that is upgraded process by process: peers of the version before, from recorded bytes, outlive restarts.

Real processes of today are restarted, as an operator would, under a node and a client of version 4 (see
``test_versions``). Real processes of another version under load: ``benchmarks/store/upgrade.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec
import pytest

import tanghulu
import tanghulu.aio
from tanghulu.discovery.master import MasterDiscovery
from tanghulu.errors import MasterUnavailable, NotLeader, TanghuluError
from tanghulu.protos import directory_pb2, store_pb2
from tanghulu.rpc.fast_aio import AsyncFastConnection
from tanghulu.rpc.methods import HELLO
from tanghulu.store.admin import orders
from tanghulu.store.admin.steps import perform
from tanghulu.store.protocol import methods
from tanghulu.types import Address
from tests.store.cluster import Cluster, eventually
from tests.store.elected_cluster import ElectedCluster
from tests.store.fault_tools import Background
from tests.store.master.running_master import FakeNode, instance, until
from tests.store.protocol.test_versions import BYTES, VALUE, ClientOfThen, peer_of_then

pytestmark = pytest.mark.slow

Report = directory_pb2.AnnounceRequest


class NodeOfThen:
    """Reports the recorded chunk "k" to whatever master it reaches, as version 4 did; begins again when asked to."""

    def __init__(self, master: Address) -> None:
        self._master = master
        self.num_reports = 0

    async def run(self) -> None:
        while True:
            try:
                connection = await AsyncFastConnection.connect(self._master)
                try:
                    await self._report(connection)
                finally:
                    await connection.close()
            except TanghuluError:  # no master, or it does not know this node yet
                await asyncio.sleep(0.05)

    async def _report(self, connection: AsyncFastConnection) -> None:
        wanted = True
        while True:
            parts = (Report.BEGIN, Report.END) if wanted else (Report.NONE,)
            for part in parts:
                request = Report.FromString(BYTES["pb.AnnounceRequest"])
                request.report = part
                if part is not Report.BEGIN:
                    del request.added[:]
                body = request.SerializeToString()
                answer = (await connection.call(methods.ANNOUNCE.number, body, bytes)).message
                reply = directory_pb2.AnnounceReply.FromString(answer)
                assert all(reply.accepted), "what it holds stands"
            self.num_reports += wanted
            wanted = reply.report_wanted
            await asyncio.sleep(0.1)


@asynccontextmanager
async def node_of_then(master: str) -> AsyncIterator[NodeOfThen]:
    async with peer_of_then() as address, MasterDiscovery(Address.parse(master)) as discovery:
        await discovery.register(replace(instance("node-1", generation=2), address=Address.parse(address)))
        node = NodeOfThen(Address.parse(master))
        reporting = asyncio.create_task(node.run())
        try:
            yield node
        finally:
            reporting.cancel()
            await asyncio.gather(reporting, return_exceptions=True)


async def test_a_node_of_then_is_never_denied_while_the_master_restarts() -> None:
    with Cluster(2, "64MiB") as cluster:
        async with node_of_then(cluster.address) as node:
            await asyncio.to_thread(eventually, lambda: node.num_reports == 1)
            async with await tanghulu.aio.connect(cluster.address, transport="tcp", deadline_s=30) as client:
                await client.put("today", b"t" * 1000)
                with tanghulu.connect(cluster.address, transport="tcp", deadline_s=30) as asking:

                    def ask() -> None:
                        assert asking.exists_many(["k", "today", "nobody's"]) == [True, True, False]

                    def watch_restarts() -> None:
                        with Background(ask, (MasterUnavailable,)) as asked:
                            for _ in range(2):
                                reports = node.num_reports
                                cluster.restart_master()
                                cluster.complete()
                                eventually(lambda reports=reports: node.num_reports > reports)  # type: ignore[misc]
                                done = asked.num_done
                                eventually(lambda done=done: asked.num_done > done or bool(asked.errors))  # type: ignore[misc]
                        assert not asked.errors

                    await asyncio.to_thread(watch_restarts)
                with await client.get("k") as chunk:
                    assert chunk.bytes() == VALUE
                with await client.get("today") as chunk:
                    assert chunk.bytes() == b"t" * 1000


def test_what_a_client_of_then_has_put_outlives_the_restart_of_every_process() -> None:
    with Cluster(2, "64MiB") as cluster:
        cluster.complete()
        put_by(cluster.nodes[0].address)
        assert holders(cluster) == [cluster.nodes[0].name]
        cluster.restart_master()
        cluster.complete()
        assert holders(cluster) == [cluster.nodes[0].name]
        for _ in range(2):
            old = cluster.nodes.pop(0)
            with tanghulu.connect(cluster.address, deadline_s=30) as operator:
                perform(operator, orders.drain(old.name, wait=True))
            old.stop()
            cluster.add_node("64MiB")
            gone = old.name
            eventually(lambda gone=gone: holders(cluster) not in ([], [gone]))  # type: ignore[misc]
            (name,) = holders(cluster)
            (holder,) = (node for node in cluster.nodes if node.name == name)
            assert got_by(holder.address) == VALUE


# --- masters that share the keys


@pytest.fixture(scope="module")
def sharing() -> Iterator[ElectedCluster]:
    with ElectedCluster(2, 2) as cluster:
        eventually(lambda: owned(cluster) == [32, 32])
        yield cluster


def owned(cluster: ElectedCluster) -> list[float]:
    """How many ranges each master owns and knows all keys of; -1: not all yet."""
    return [
        -1.0 if each.metric("tanghulu_master_rebuilding") else each.metric("tanghulu_master_owned_ranges")
        for each in cluster.masters
    ]


def test_a_client_of_version_5_asks_the_leader_for_keys_of_every_owner(sharing: ElectedCluster) -> None:
    leader, keys = sharing.leader(), [f"kv/{n}" for n in range(100)]
    with tanghulu.connect(sharing.address, deadline_s=30) as today:
        assert all(each.ok for each in today.put_many([(key, VALUE) for key in keys]))
        put_by(sharing.nodes[0].address, version=5)
        eventually(lambda: today.exists("v5/k"))
    client = ClientOfThen(leader.address, version=5)
    assert client.fields(client.ask(methods.LOCATE, "exists.request")[0], "exists.reply")[:3] == [False, [], b"\1\0"]
    request = msgspec.msgpack.encode([keys, True])
    assert client.fields(client.ask(methods.LOCATE, request)[0], "exists.reply")[:3] == [False, [], b"\1" * 100]
    results = msgspec.msgpack.decode(client.ask(methods.COMMIT_KEYS, "commit_keys.request")[0])[0]
    assert results == [2] * 8, "of a node that is none; the owners have answered"
    listing = directory_pb2.ListKeysRequest(prefix="kv/", limit=60).SerializeToString()
    page = directory_pb2.ListKeysReply.FromString(client.ask(methods.LIST_KEYS, listing)[0])
    assert ([info.key for info in page.keys], page.more) == (sorted(keys)[:60], True)
    wait = directory_pb2.WaitRequest(keys=[*keys, "none"], deadline_ms=100).SerializeToString()
    assert directory_pb2.WaitReply.FromString(client.ask(methods.WAIT, wait)[0]).found == b"\1" * 100 + b"\0"
    nodes = directory_pb2.NodesReply.FromString(client.ask(methods.NODES, b"")[0])
    assert sum(node.num_chunks for node in nodes.nodes) >= len(keys)
    assert leader.metric("tanghulu_master_forwarded_calls_total") >= 5
    client.close()


async def test_while_a_node_of_version_5_is_there_the_leader_owns_everything(sharing: ElectedCluster) -> None:
    leader = Address.parse((await asyncio.to_thread(sharing.leader)).address)
    told = instance("node-then")
    async with MasterDiscovery(leader) as discovery:
        registration = await discovery.register(told)
        await asyncio.to_thread(eventually, lambda: sorted(owned(sharing), reverse=True)[0] in (64, -1))
        node = await FakeNode.connect(leader, told)

        async def reports() -> bool:
            try:
                return all((await node.report(("then/k", 7, 5))).accepted)
            except NotLeader:  # some ranges are on their way yet
                return False

        await until(reports)
        async with await tanghulu.aio.connect(sharing.address, transport="tcp", deadline_s=30) as client:
            assert await client.exists_many(["then/k", "then/none"]) == [True, False]
            await node.connection.close()
            await registration.close()
            await asyncio.to_thread(eventually, lambda: owned(sharing) == [32, 32])
            assert await client.exists_many(["then/k"]) == [False], "it has left"


def put_by(address: str, version: int = 4) -> None:
    client = ClientOfThen(address, version)
    greet(client, version)
    assert client.fields(client.ask(methods.PUT, "put.request", VALUE)[0], "put.reply")[0] == [False]
    client.close()


def got_by(address: str) -> bytes:
    client = ClientOfThen(address)
    greet(client)
    answer, value = client.ask(methods.GET, "get.request")
    assert client.fields(answer, "get.reply")[0] == msgspec.msgpack.decode(BYTES["get.reply"])[0]
    client.close()
    return value


def greet(client: ClientOfThen, version: int = 4) -> None:
    assert store_pb2.HelloReply.FromString(client.ask(HELLO, "hello.request")[0]).protocol_version == version


def holders(cluster: Cluster) -> list[str]:
    """Who the master names to a client of then."""
    master = ClientOfThen(cluster.address)
    _, (location,), _ = msgspec.msgpack.decode(master.ask(methods.LOCATE, "locate.request")[0])[:3]
    master.close()
    return [] if location is None else list(location[2])
