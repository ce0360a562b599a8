"""The simulated processes of a store: production classes, wired as their mains wire them, over `loop`.

What is not simulated as it is: registration (its gRPC carrier is replaced by a call with the network's delay) and the
bytes of large values (copied into the owner's memory after a delay, admitted by the owner's access table). A client on
a node's host has its memory at hand: it reads the index and writes into buffers as if it had mapped it; the end of its
process is told by the world.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import mmap
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from prometheus_client import CollectorRegistry

from tanghulu.discovery.base import HOLDS_NOTHING, Instance
from tanghulu.discovery.masters import MasterFinder
from tanghulu.errors import DeadlineExceeded, TanghuluError, TransferFailed
from tanghulu.eviction.policies import make_policy
from tanghulu.masters import Masters
from tanghulu.rpc.fast_server import FastServerProtocol, FastService, Peer
from tanghulu.rpc.frames import PREAMBLE
from tanghulu.runtime.clock import SystemClock
from tanghulu.store.client.aio import AsyncClient
from tanghulu.store.client.drivers.asynchronous import AsyncioDriver
from tanghulu.store.client.settings import Settings
from tanghulu.store.master.core import Master
from tanghulu.store.master.metrics import MasterMetrics
from tanghulu.store.master.rpc.directory_service import DirectoryCalls
from tanghulu.store.master.server import MasterServer
from tanghulu.store.node.reporting.reporter import Reporter
from tanghulu.store.node.rpc.metrics import TrafficCounters
from tanghulu.store.node.rpc.service import NodeIdentity, NodeService
from tanghulu.store.node.rpc.sessions import Sessions
from tanghulu.store.node.ssd.admission import TierAdmission
from tanghulu.store.node.ssd.promotion import Promoter
from tanghulu.store.node.ssd.tier import QUEUE_BYTES, SsdTier, open_tier
from tanghulu.store.node.state.chunk_table import Published
from tanghulu.store.node.state.holdings import Holding
from tanghulu.store.node.state.limits import Watermarks
from tanghulu.store.node.state.node_state import make_node_state
from tanghulu.store.node.state.ssd_chunk import SsdChunk
from tanghulu.store.node.state.write_buffers import AREA_BYTES
from tanghulu.store.node.writes.copier import Copier
from tanghulu.store.node.writes.puts import PutService
from tanghulu.store.protocol.announcements import Orders
from tanghulu.store.protocol.shared_index import IndexPlace, IndexWriter, index_bytes, num_buckets_for
from tanghulu.store.protocol.write_buffer import HEAD_BYTES
from tanghulu.transfer_engine.client.requests import TransferBatch, TransferRequest
from tanghulu.transfer_engine.core.access import AccessTable, Freed
from tanghulu.transfer_engine.core.buffers import Buffer
from tanghulu.transfer_engine.core.segment import SegmentDescriptor, SessionKey
from tanghulu.transfer_engine.core.slices import Opcode
from tanghulu.types import Address, ChunkKey, InstanceId, LeaseId, Place, Role
from tests.virtual.loop import HOST, PID, Network, Pipe, on_host

MASTER = Address("master", 1)
LEASE_MS = 3000
TICK_S = 0.1
REGISTER_TTL_S = 3.0


class Server(asyncio.Protocol):
    """What the fast port does for the fast lane: takes the preamble off, then hands the connection over."""

    def __init__(self, service: FastService) -> None:
        self._peer = Peer(pid=None, is_unix=False, name="simulated")
        self._inner = FastServerProtocol(service, self._peer)
        self._head = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, Pipe)
        self._peer.pid = transport.peer.pid
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if len(self._head) < len(PREAMBLE):
            missing = len(PREAMBLE) - len(self._head)
            self._head, data = self._head + data[:missing], data[missing:]
        if data:
            self._inner.data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._inner.connection_lost(exc)


class SimProcess:
    """A process on a host of its own: tasks that end with it."""

    def __init__(self, host: str, network: Network) -> None:
        self.host = host
        self.network = network
        self.alive = True
        self._tasks: list[asyncio.Task[Any]] = []

    def spawn(self, coroutine: Any) -> None:
        self._tasks.append(on_host(self.host, coroutine))

    def kill(self, *, silently: bool = False) -> None:
        """The process is gone at once, in the middle of whatever it did."""
        self.alive = False
        for task in self._tasks:
            task.cancel()
        self.network.host_gone(self.host, silently=silently)


class _SimSessions(Sessions):
    """Processes are watched by the world."""

    def _watch_process(self, session_id: int, pid: int) -> bool:
        return True

    def process_exited(self, pid: int) -> None:
        for session_id in [session_id for session_id, client in self._pids.items() if client[1] == pid]:
            if any(session.session_id == session_id for session in self._by_client.values()):
                asyncio.get_running_loop().call_later(0.05, self.process_exited, pid)
                return
            self._exited(session_id)


class SimMaster(SimProcess):
    """A master: its core, its directory calls, its ticking."""

    def __init__(self, network: Network, generation: int, rng: Random) -> None:
        super().__init__("master", network)
        clock = SystemClock()
        self.core = Master(generation, clock.now_s(), rng=rng)
        self.core.directory.grants.piece_keys = rng.choice((1, 3, 10, 4096))  # reports that take long, too
        self.shell = MasterServer(self.core, clock, MasterMetrics(CollectorRegistry()), rng)
        service = FastService()
        DirectoryCalls(self.shell).serve(service)
        HOST.set(self.host)
        network.listen(str(MASTER), functools.partial(Server, service))
        self.spawn(self.shell.run())

    def registered(self, instance: Instance, lease_id: int) -> int:
        """Enter a node, or renew its lease; returns the lease's id."""
        now_s = self.shell.now_s
        if not lease_id or not self.core.keep_alive(instance.id, lease_id, now_s):
            lease_id = self.core.register(instance, REGISTER_TTL_S, now_s)
        self.shell.changed()
        return lease_id

    def check(self) -> None:
        """Assert the core's invariants."""
        self.core.check()


class _SimCopier(Copier):
    """A node's client for copies, over the world's network."""

    def __init__(self, node: SimNode, masters: Masters) -> None:
        super().__init__(masters, node.puts, node.reporter.copy_failed)
        self._node = node

    def _open(self) -> AsyncioDriver:
        PID.set(next(self._node._world._pids))
        settings = Settings(
            master=self._settings.master, transport="tcp", client_id=self._node.id, host_id=self._node.host
        )
        driver: Any = AsyncioDriver(settings)
        driver._engine.close()
        driver._engine = SimEngine(self._node._world, self._node.host, "")
        opened: AsyncioDriver = driver
        return opened

    def killed(self) -> None:
        """The process is gone, and warns nobody."""
        if self._driver is not None:
            self._driver._closed = True


class SimNode(SimProcess):
    """A store node with ``capacity_bytes`` of memory."""

    def __init__(self, number: int, network: Network, world: Any, generation: int, capacity_bytes: int) -> None:
        super().__init__(f"node-{number}", network)
        self._world = world
        self.address = Address(self.host, 7410)
        self.id = InstanceId(f"node-{number}")
        self.generation = generation
        self.capacity_bytes = capacity_bytes
        place = IndexPlace(0, num_buckets_for(capacity_bytes), generation)
        self.index = mmap.mmap(-1, index_bytes(place.num_buckets))
        self.memory = mmap.mmap(-1, capacity_bytes + AREA_BYTES)  # most of it is never touched, and costs nothing
        view = memoryview(self.memory)
        clock = SystemClock()
        self.access = AccessTable(clock, LEASE_MS, capacity_bytes, random_bytes=Random(generation).randbytes)
        self.published = Published(IndexWriter(memoryview(self.index), generation, clock.now_s()))
        self.tier: SsdTier | None = None
        disk = world.disk_of(self.host)

        def open_disk(on_lost: Callable[[SsdChunk], None]) -> SsdTier:
            admission = TierAdmission("all", QUEUE_BYTES, 0)
            self.tier = open_tier(disk, view, admission, lambda: make_policy("lru"), clock, on_lost)
            return self.tier

        self.state = make_node_state(
            capacity_bytes,
            self.access,
            lambda: make_policy("lru"),
            clock,
            generation=generation,
            published=self.published,
            buffer_memory=(view, capacity_bytes),
            make_tier=None if disk is None else open_disk,
        )
        self.promoter = None if self.tier is None else Promoter(self.state, self.tier, view)
        self.watermarks = Watermarks(capacity_bytes, *((1.0, 0.95) if self.tier is None else (0.95, 0.9)))
        self.reporter = Reporter(
            self.state,
            MasterFinder(world.masters_named),
            generation,
            self._changed,
            self._not_registered,
            self._ordered,
        )
        self.puts = PutService(self.state, view, self.reporter)
        self.copier = _SimCopier(self, Masters.parse(world.masters_named))
        self.copies = world.plan.moves
        self.sessions = _SimSessions(self.state, self._changed)
        service = FastService()
        descriptor = SegmentDescriptor("store", len(self.memory), self.host, generation, ())
        identity = NodeIdentity(self.id, generation, descriptor, place)
        self.traffic = traffic = TrafficCounters()
        NodeService(identity, self.state, self.puts, self.sessions, traffic, self.promoter).serve(service)
        self._register_now = asyncio.Event()
        HOST.set(self.host)
        if self.tier is not None and self.promoter is not None:
            _at_once(self.tier.recover())
            self.promoter.bring_up_pinned()
        network.listen(str(self.address), functools.partial(Server, service))
        for coroutine in (self._stay_registered(), self.reporter.run(self.id), self.copier.run()):
            self.spawn(coroutine)
        network.loop.call_later(TICK_S, self._tick)

    def _changed(self) -> None:
        self.puts.room_changed()
        if self.promoter is not None:
            self.promoter.room_changed()

    def kill(self, *, silently: bool = False) -> None:
        self.copier.killed()
        super().kill(silently=silently)
        self.close_disk()

    def close_disk(self) -> None:
        """Let the file go as the kernel does: what this process would still do to it is lost."""
        if self.tier is not None and not self.tier._closed:
            self.tier._closed = True
            self.tier.file.close()
            self.tier.file._fd = -1

    def _not_registered(self) -> None:
        self._register_now.set()

    def _ordered(self, orders: Orders) -> None:
        self.state.drain_buffers()
        if self.copies:
            self.copier.order(orders)
        else:
            for copy in orders.copies:
                self.reporter.copy_failed(copy.key)
        for key, version, removed in orders.drops:
            self.state.chunks.let_go(key, version, removed=removed)

    def drain(self, draining: bool) -> None:
        """Take no new chunks, or take them again, and have the master know."""
        self.state.drain(draining)
        self._changed()
        self._register_now.set()

    async def _stay_registered(self) -> None:
        lease_id, instance, told = 0, self._instance(), dict[str, str]()
        if not self.state.chunks.all_keys():
            instance.attributes[HOLDS_NOTHING] = "true"
        while True:
            draining = {"draining": "true"} if self.state.draining else {}
            self._register_now.clear()
            now = replace(instance, attributes=instance.attributes | draining)
            lease_id = await self._world.registered(now, 0 if draining != told else lease_id)
            instance, told = instance.again(), draining
            try:
                async with asyncio.timeout(REGISTER_TTL_S / 3):
                    await self._register_now.wait()
            except TimeoutError:
                continue

    def _instance(self) -> Instance:
        memory = {"memory_bytes": str(self.capacity_bytes), "host_id": self.host}
        place = Place("zone", f"rack-{len(self.id) % 3}", self.host)
        return Instance(
            self.id,
            Role.NODE,
            self.address,
            place=place,
            generation=self.generation,
            attributes=memory,
            unix_path=f"/simulated/{self.host}",
        )

    def _tick(self) -> None:
        if not self.alive:
            return
        now_s = SystemClock().now_s()
        self.state.expire(now_s)
        self.published.beat(now_s)
        self.sessions.forget_ended()
        self.puts.incoming.tick()
        self.state.tick_buffers(now_s)
        chunks = self.state.chunks
        chunks.evict_ahead(self.watermarks.wanted(chunks.used_bytes, chunks.tier.free_queue_bytes))
        self._changed()
        self.reporter.tick()
        self.network.loop.call_later(TICK_S, self._tick)

    def client_exited(self, pid: int) -> None:
        """One of this host's processes has ended."""
        if self.alive:
            self.sessions.process_exited(pid)

    # --- large values

    def take(self, request: TransferRequest, session_id: int) -> list[Freed]:
        """Move the bytes of one request; raises the access table's errors."""
        lease_id, end = LeaseId(request.lease_id), request.target_offset + request.length
        self.access.begin(session_id, lease_id, request.opcode, request.target_offset, request.length)
        here, there = memoryview(self.memory)[request.target_offset : end], _bytes_of(request)
        if request.opcode is Opcode.WRITE:
            here[:] = there
        else:
            there[:] = here
        return self.access.end(lease_id)

    def check(self) -> None:
        """Assert the invariants of all parts."""
        self.state.check()
        self.sessions.check()
        self.puts.incoming.check()
        if self.tier is not None and self.alive:
            self.tier.check()

    def check_idle(self) -> None:
        """Assert that nothing is kept for anybody: all clients have ended some time ago."""
        state = self.state
        assert not state.leases.leases(), f"{self.host} keeps {state.leases.leases()} for nobody"
        assert not state.has_writers, f"{self.host} keeps reservations or write buffers for nobody"

    @property
    def keys(self) -> set[str]:
        """The keys of what the node has to give, in memory and on its disk."""
        chunks = self.state.chunks
        return {chunk.key for chunk in chunks.table if chunk.is_live} | {entry.key for entry in chunks.tier.entries()}

    def find(self, key: str) -> Holding | None:
        """The node's chunk of ``key``, in memory or on its disk."""
        return self.state.chunks.find(ChunkKey(key)) or self.state.chunks.find_below(ChunkKey(key))

    def remembers_removal(self, key: str) -> bool:
        """Whether this node, alive, would tell a new master that a client has removed ``key``."""
        return self.alive and any(removal.key == key for removal in self.state.reports._deleted)


def _at_once(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run what waits for threads alone, or lets others go on: in virtual time threads are done at once."""
    with contextlib.suppress(StopIteration):
        while True:
            assert coroutine.send(None) is None, "a coroutine waits for more than threads"


def _bytes_of(request: TransferRequest) -> memoryview:
    source = request.source
    view = source.view(0, source.size_bytes) if hasattr(source, "view") else memoryview(source).cast("B")
    return view[request.source_offset : request.source_offset + request.length]


class _Remote:
    """An open segment of a node, as the client's links see it; mapped where ``memory`` is given."""

    def __init__(self, world: Any, descriptor: SegmentDescriptor, session_id: int, memory: mmap.mmap | None) -> None:
        self.node, self.generation, self.session_id = descriptor.host_id, descriptor.generation, session_id
        self._world, self._memory, self._closed = world, memory, False
        self.transport = "tcp" if memory is None else "shm"

    @property
    def alive(self) -> bool:
        if self._closed or self._memory is None:
            return not self._closed
        node = self._world.nodes[self.node]
        return bool(node.alive and node.generation == self.generation)

    def map(self) -> memoryview | None:
        return None if self._memory is None else memoryview(self._memory)

    map_writable = map

    def map_published(self) -> memoryview | None:
        return None if self._memory is None else memoryview(self._world.nodes[self.node].index)

    def touch(self, offset: int, length: int) -> None:
        """Has its pages mapped beforehand, which here costs nothing."""

    def close(self) -> None:
        self._closed = True


@dataclass
class _Submitted:
    """A batch that tells which of its requests failed."""

    engine: SimEngine
    requests: Sequence[TransferRequest]
    errors: list[TanghuluError | None] = field(default_factory=list)

    async def wait_async(self, deadline_s: float) -> _Submitted:
        until_s = asyncio.get_running_loop().time() + deadline_s
        for request in self.requests:
            try:
                await self.engine._move(request, until_s)
                self.errors.append(None)
            except TanghuluError as error:
                self.errors.append(error)
        return self


class SimEngine:
    """What the client's shell asks of a transfer engine."""

    def __init__(self, world: Any, host: str, near: str) -> None:
        self._world, self._host, self._near = world, host, near

    async def open_segment_async(
        self, descriptor: SegmentDescriptor, session: SessionKey, transport: str | None
    ) -> _Remote:
        node = self._world.nodes[descriptor.host_id]
        mapped = descriptor.host_id == self._near and transport != "tcp" and node.generation == descriptor.generation
        return _Remote(self._world, descriptor, session.session_id, node.memory if mapped else None)

    async def transfer_async(self, requests: Sequence[TransferRequest], deadline_s: float) -> None:
        until_s = asyncio.get_running_loop().time() + deadline_s
        for request in requests:
            await self._move(request, until_s)

    async def _move(self, request: TransferRequest, until_s: float) -> None:
        remote: Any = request.target
        network: Network = self._world.network
        await self._on_the_way(remote.node, until_s)
        node = self._world.nodes.get(remote.node)
        if network.is_cut(self._host, remote.node):
            left_s = until_s - asyncio.get_running_loop().time()
            await asyncio.sleep(min(max(left_s, 0.0), 1.0))
            raise TransferFailed(f"{remote.node} does not answer")
        if node is None or not node.alive or node.generation != remote.generation:
            raise TransferFailed(f"{remote.node} is gone")
        node.state.leases.freed(node.take(request, remote.session_id))
        node._changed()
        await self._on_the_way(remote.node, until_s)

    async def _on_the_way(self, node: str, until_s: float) -> None:
        latency_s, left_s = self._world.network.latency_s(self._host, node), until_s - asyncio.get_running_loop().time()
        await asyncio.sleep(min(latency_s, max(left_s, 0.0)))
        if latency_s > left_s:
            raise DeadlineExceeded(f"the transfer to {node} did not end in time")

    def submit(self, batch: TransferBatch) -> _Submitted:
        return _Submitted(self, batch.requests)

    def register(self, buffer: Any) -> Buffer:
        return Buffer(buffer)

    def close(self) -> None:
        return


def open_client(world: Any, host: str, near: str, client_id: str) -> AsyncClient:
    """A client of the production's asyncio driver on ``host``, which is that of the node ``near`` if one is named."""
    master = Masters.parse(world.masters_named)
    if near:
        client = AsyncClient(Settings(master=master, client_id=client_id, host_id=near))
    else:
        client = AsyncClient(Settings(master=master, transport="tcp", client_id=client_id, host_id=host))
    driver: Any = client._driver
    driver._engine.close()
    driver._engine = SimEngine(world, host, near)
    return client


def kill_writers(client: AsyncClient) -> None:
    """The client's process is killed: what its coroutines still do when they are cancelled reaches no memory."""
    for writer in client._driver.context.write_buffers._open.values():
        writer._words = memoryview(bytearray(HEAD_BYTES)).cast("Q")
        writer._range = memoryview(bytearray(writer._length))
        writer._records = memoryview(bytearray(len(writer._records)))
