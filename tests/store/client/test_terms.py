"""A leader that stood still, its clock with it, still believes that it leads: who knows its successor refuses it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

import tanghulu
import tanghulu.aio
from tanghulu.errors import KeysMoved, MasterUnavailable, NotLeader
from tanghulu.eviction.policies import make_policy
from tanghulu.rpc.fast_aio import AsyncFastConnection
from tanghulu.rpc.fast_client import Reply
from tanghulu.rpc.fast_server import FastServerProtocol, FastService, Peer
from tanghulu.rpc.frames import PREAMBLE
from tanghulu.store.client.logic import operations
from tanghulu.store.client.logic.effects import PeerId
from tanghulu.store.client.logic.master_calls import admitted
from tanghulu.store.client.logic.write_buffers import MappedNode
from tanghulu.store.client.model import PutItem
from tanghulu.store.master.core import Master
from tanghulu.store.master.election import masters_view
from tanghulu.store.master.election.masters_view import KeySeen, range_name
from tanghulu.store.master.election.ownership import Duties, EtcdOwnership
from tanghulu.store.master.metrics import MasterMetrics
from tanghulu.store.master.rpc.directory_service import DirectoryCalls
from tanghulu.store.master.server import MasterServer
from tanghulu.store.node.state.chunk_table import Published
from tanghulu.store.node.state.node_state import make_node_state
from tanghulu.store.protocol.announcements import ChunkEntry, NodeAnnouncement, ReportPiece
from tanghulu.store.protocol.directory_messages import ListKeysRequest, NodesRequest, WaitRequest
from tanghulu.store.protocol.key_slots import NUM_RANGES, NUM_SLOTS
from tanghulu.store.protocol.messages import (
    CommitKeysReply,
    CommitKeysRequest,
    LocateReply,
    LocateRequest,
    ProveReply,
    ProveRequest,
)
from tanghulu.store.protocol.methods import COMMIT_KEYS, LIST_KEYS, LOCATE, NODES, PROVE, WAIT
from tanghulu.store.protocol.shared_index import IndexPlace, IndexReader, IndexWriter, index_bytes
from tanghulu.store.protocol.terms import NO_TERM, Renewals, Signature, Term
from tanghulu.store.protocol.types import ClientCommit, CommitResult
from tanghulu.transfer_engine.core.access import AccessTable
from tanghulu.types import Address, ChunkKey, Role
from tests.store.client.test_logic import OK, FakeCluster
from tests.store.master.running_master import instance, master_here
from tests.virtual.clock import ManualClock

ETCD, LEASE = 77, 5


class Door:
    """A fast lane's TCP port, as the fast port opens it."""

    def __init__(self, service: FastService) -> None:
        self.service = service
        self.is_open = True
        self._server: asyncio.Server | None = None

    async def open(self, port: int) -> str:
        self._server = await asyncio.get_running_loop().create_server(lambda: _Connection(self), "127.0.0.1", port)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def close(self) -> None:
        """Let go of the port and of every peer, also of those that are being accepted."""
        assert self._server is not None
        self.is_open = False
        self._server.close()
        for peer in list(self.service.peers):
            peer.hang_up()


class _Connection(asyncio.Protocol):
    """What the fast port does for the fast lane."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._inner = FastServerProtocol(door.service, Peer(None, False, "test"))
        self._head = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._inner.connection_made(transport)
        if not self._door.is_open:
            transport.abort()  # type: ignore[attr-defined]  # every transport of a socket has it

    def data_received(self, data: bytes) -> None:
        missing = len(PREAMBLE) - len(self._head)
        self._head, data = self._head + data[:missing], data[missing:]
        if data:
            self._inner.data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._inner.connection_lost(exc)


class FakeEtcd:
    """Of etcd, the lease of one master."""

    has_lease = True

    async def keep_alive(self, lease: int) -> bool:
        return self.has_lease

    async def revoke(self, lease: int) -> None:
        self.has_lease = False


class ElectedMaster:
    """The only master, of map ``term``, whose clock stands still, so that it believes for ever that it owns all."""

    def __init__(self, term: int) -> None:
        clock, node, itself = ManualClock(), instance("n1"), instance("m", Role.MASTER)
        master = Master(term, clock.now_s(), 0.0, rng=Random(1), shares=True)
        server = self.server = MasterServer(master, clock, MasterMetrics(CollectorRegistry()), Random(1))
        duties = Duties(server.own, server.disown, server.lead, server.lead_no_more, server.update_nodes)
        owning = self.ownership = EtcdOwnership([Address("127.0.0.1", 1)], itself, 3.0, clock, duties)
        self.etcd = owning._client = FakeEtcd()  # type: ignore[assignment]
        owning.cluster = ETCD
        owning.election.snapshot([], 1, clock.now_s())
        owning.election.lease_granted(LEASE, clock.now_s(), clock.now_s())
        keys = [
            KeySeen(masters_view.NODES + node.id, 2, instance=node),
            KeySeen(masters_view.ADMITTED, 2, text=node.id),
        ]
        keys += [
            KeySeen(name, term, LEASE, instance=itself)
            for name in (masters_view.MASTERS + itself.id, masters_view.LEADER)
        ]
        keys += [KeySeen(range_name(number), term, LEASE, text=itself.id) for number in range(NUM_RANGES)]
        owning._see(owning.election.seen(keys, clock.now_s()))
        assert owning.leads
        server.ownership = owning
        self.service = FastService()
        calls = DirectoryCalls(self.server)
        calls.serve(self.service)
        master.register(node, 600.0, clock.now_s())
        report = ReportPiece(0, NUM_SLOTS)  # it holds nothing yet
        calls.announce(NodeAnnouncement("n1", 7, report_id=1, piece=report))
        master.tick(clock.now_s(), 0.0)
        assert master.directory.is_ready

    def holds(self, key: str) -> None:
        said = NodeAnnouncement("n1", 7, added=[ChunkEntry(key, 1, 5)], capacity_bytes=1 << 20)
        self.server.master.announce(said, 0.0)


@asynccontextmanager
async def serving(master: ElectedMaster, port: int = 0) -> AsyncIterator[tuple[str, Door]]:
    door = Door(master.service)
    address = await door.open(port)
    try:
        yield address, door
    finally:
        door.close()


async def refuses_the_deposed(exists: Callable[[str, str], Any]) -> None:
    """``exists(addresses, key)`` asks with one client, again and again."""
    old, new = ElectedMaster(7), ElectedMaster(9)
    old.holds("removed since")
    async with serving(old) as (old_address, _), serving(new) as (new_address, door):
        addresses = f"{new_address},{old_address}"
        assert not await exists(addresses, "removed since"), "the leader of term 9 knows better"
        door.close()
        with pytest.raises(MasterUnavailable):
            await exists(addresses, "removed since")


async def test_a_client_that_has_heard_of_the_successor_refuses_a_leader_that_stood_still() -> None:
    clients: list[tanghulu.aio.AsyncClient] = []

    async def exists(addresses: str, key: str) -> bool:
        if not clients:
            clients.append(await tanghulu.aio.connect(addresses, deadline_s=1.0))
        return await clients[0].exists(key)

    try:
        await refuses_the_deposed(exists)
    finally:
        await clients[0].close()


async def test_so_does_a_blocking_client() -> None:
    clients: list[tanghulu.Client] = []

    def ask(addresses: str, key: str) -> bool:
        if not clients:
            clients.append(tanghulu.connect(addresses, deadline_s=1.0))
        return clients[0].exists(key)

    try:
        await refuses_the_deposed(lambda addresses, key: asyncio.to_thread(ask, addresses, key))
    finally:
        await asyncio.to_thread(clients[0].close)


async def test_a_deposed_master_takes_no_commit_of_who_knows_its_successor_and_stays() -> None:
    master = ElectedMaster(7)
    async with serving(master) as (address, _):
        connection = await AsyncFastConnection.connect(Address.parse(address))
        said = ClientCommit("n1", 7, ChunkKey("k"), 3, 5, Term(9, ETCD))
        with pytest.raises(KeysMoved):
            await connection.call(COMMIT_KEYS.number, CommitKeysRequest([said]), CommitKeysReply)
        assert master.ownership.leads, "a client's word deposes nobody"
        of_another_etcd = ClientCommit("n1", 7, ChunkKey("k"), 3, 5, Term(9, ETCD + 1))
        reply = await connection.call(COMMIT_KEYS.number, CommitKeysRequest([of_another_etcd]), CommitKeysReply)
        signature = Signature(Term(7, ETCD), Renewals(1, 1).packed)
        assert reply.message == CommitKeysReply([CommitResult.ACCEPTED], signature)
        await connection.close()


# --- who knows of no successor asks for a proof of the lease


@pytest.mark.parametrize("driver", ["asyncio", "blocking"])
async def test_who_meets_a_leader_whose_lease_is_over_does_not_believe_it(driver: str) -> None:
    """Its clock stood still with it, so it believes that it leads; etcd does not."""
    master = ElectedMaster(7)
    master.holds("k")
    async with serving(master) as (address, _):
        addresses = f"{address},127.0.0.1:1"

        async def ask() -> bool:
            if driver == "asyncio":
                async with tanghulu.aio.connect(addresses, deadline_s=1.0) as client:
                    return await client.exists("k")

            def blocking() -> bool:
                with tanghulu.connect(addresses, deadline_s=1.0) as client:
                    return client.exists("k")

            return await asyncio.to_thread(blocking)

        assert await ask()
        master.etcd.has_lease = False
        assert master.ownership.leads, "it thinks"
        with pytest.raises(MasterUnavailable):
            await ask()


async def test_calls_that_wait_for_a_proof_share_renewals_and_end_when_the_master_steps_down() -> None:
    master = ElectedMaster(7)
    gate, asked = asyncio.Event(), 0

    async def keep_alive(lease: int) -> bool:
        nonlocal asked
        asked += 1
        await gate.wait()
        return master.etcd.has_lease

    master.etcd.keep_alive = keep_alive  # type: ignore[method-assign]
    calls = [asyncio.ensure_future(master.ownership.prove()) for _ in range(20)]
    await asyncio.sleep(0)
    late = [asyncio.ensure_future(master.ownership.prove()) for _ in range(20)]
    gate.set()
    requested_before = [proof.requested_before for proof in await asyncio.gather(*calls, *late)]
    assert requested_before == sorted(requested_before)
    assert requested_before[0] == 1, "the grant of the lease"
    assert asked <= 4, "each renewal serves all who came before it was asked for"
    master.etcd.has_lease = False
    for failed in await asyncio.gather(*(master.ownership.prove() for _ in range(3)), return_exceptions=True):
        assert isinstance(failed, NotLeader)


async def test_a_master_that_was_not_elected_proves_nothing_and_needs_not() -> None:
    async with master_here() as process, await tanghulu.aio.connect(str(await process.address)) as client:
        assert not await client.exists("k")
        connection = await AsyncFastConnection.connect(await process.address)
        reply = await connection.call(PROVE.number, ProveRequest(), ProveReply)
        assert reply.message == ProveReply()
        await connection.close()


# --- a client that knows only the master that stood still learns of its successor from nodes


OF_OLD = Reply(LocateReply(False, (None,), b"", Signature(Term(7, ETCD))), memoryview(b""))


@pytest.mark.parametrize("operation", ["get", "put"])
def test_the_answers_of_nodes_tell_the_newest_term(operation: str) -> None:
    fake = FakeCluster("a")
    fake.values["a"]["k"], fake.directory["k"] = b"right", ["a"]
    assert admitted(fake.context, OF_OLD) is OF_OLD
    fake.term = Term(9, ETCD)
    logic = (
        operations.get(fake.context, fake.deadline, "k")
        if operation == "get"
        else operations.put(fake.context, fake.deadline, PutItem("n", b"v"), OK)
    )
    fake.run(logic)
    assert isinstance(admitted(fake.context, OF_OLD), NotLeader)


def test_the_memory_of_nodes_of_this_host_tells_the_newest_term() -> None:
    memory = memoryview(bytearray(index_bytes(64)))
    writer = IndexWriter(memory, 1, 0.0)
    reader = IndexReader(memory, memory, IndexPlace(0, 64, 1))
    fake = FakeCluster("a")
    link: Any = None
    fake.context.mapped[PeerId("a")] = MappedNode(link, reader, 7)
    assert admitted(fake.context, OF_OLD) is OF_OLD
    for term in (Term(9, ETCD), Term(3, ETCD + 1), Term(8, ETCD)):
        writer.publish_term(term)
        assert reader.term == term
    writer.publish_term(Term(9, ETCD))
    assert isinstance(admitted(fake.context, OF_OLD), NotLeader)


def test_a_node_tells_readers_of_its_memory_whom_it_obeys() -> None:
    memory = memoryview(bytearray(index_bytes(64)))
    clock = ManualClock()
    published = Published(IndexWriter(memory, 1, 0.0))
    state = make_node_state(
        1 << 20, AccessTable(clock, 1000, 1 << 20), lambda: make_policy("lru"), clock, published=published
    )
    reader = IndexReader(memory, memory, IndexPlace(0, 64, 1))
    assert reader.term == NO_TERM
    assert state.admits(Term(9, ETCD))
    assert not state.admits(Term(7, ETCD))
    assert reader.term == Term(9, ETCD)


async def test_every_reply_of_the_directory_carries_the_term() -> None:
    master = ElectedMaster(7)
    said = ClientCommit("n1", 7, ChunkKey("k"), 3, 5)
    requests = [
        (LOCATE, LocateRequest(["k"], True)),
        (LOCATE, LocateRequest(["k"], False)),
        (COMMIT_KEYS, CommitKeysRequest([said])),
        (NODES, NodesRequest()),
        (LIST_KEYS, ListKeysRequest()),
        (WAIT, WaitRequest(["k"])),
    ]
    async with serving(master) as (address, _):
        connection = await AsyncFastConnection.connect(Address.parse(address))
        for method, request in requests:
            reply = (await connection.call(method.number, request, method.reply)).message
            assert reply.signature.term == (7, ETCD), method.name
        await connection.close()
