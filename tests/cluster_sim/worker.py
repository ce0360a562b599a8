"""A simulated worker: the product's classes, wired as `tanghulu.workers.assembly` wires them.

Not as they are: its port (the fast lane's protocols over `Network`), the
memory that others read (copied after a delay, admitted by the worker's own access table), and the time that its model
takes.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from random import Random
from typing import Any

from prometheus_client import CollectorRegistry

from tanghulu.discovery.base import Instance
from tanghulu.errors import DeadlineExceeded, NodeUnavailable, TanghuluError, TransferFailed
from tanghulu.rpc.fast_aio import AsyncFastConnection
from tanghulu.rpc.fast_client import Call
from tanghulu.rpc.fast_server import FastServerProtocol, FastService, Peer
from tanghulu.rpc.frames import PREAMBLE
from tanghulu.rpc.methods import EndReply
from tanghulu.runtime.clock import SystemClock
from tanghulu.session.speed import SpeedMeter
from tanghulu.transfer_engine.core.access import AccessTable
from tanghulu.transfer_engine.core.segment import SegmentDescriptor, SessionKey
from tanghulu.types import Address, Fingerprint, InstanceId, LeaseId, Role
from tanghulu.workers.engine.engine import EngineCore
from tanghulu.workers.engine.scheduler import EngineCoreConfig
from tanghulu.workers.engine.thread import EngineThread, StepReport
from tanghulu.workers.kv.connector import KvConnector
from tanghulu.workers.kv.peer_reader import PeerReader
from tanghulu.workers.kv.peer_server import KvIdentity, PeerServer
from tanghulu.workers.kv.ports import HostBlocks
from tanghulu.workers.metrics import WorkerMetrics
from tanghulu.workers.sessions.health import EngineBeats, EngineProbe
from tanghulu.workers.sessions.port import WorkerCalls
from tanghulu.workers.sessions.reports import EngineReports
from tanghulu.workers.sessions.server import SessionHub
from tanghulu.workers.sessions.wire import RequestFactory, model_card
from tests.cluster_sim import text
from tests.cluster_sim.process import Process
from tests.discovery.memory import MemoryDiscovery
from tests.virtual.loop import Network
from tests.virtual.threads import Threads

PORT = 7430
LEASE_MS = 20_000
REGISTER_TTL_S = 3.0
STEP_TOKENS = 64
#: A worker whose engine gives no sign of life for so long is killed by whoever supervises it.
SUPERVISED_S = 6.0
_HANG_LOOK_S = 0.05


class SimWorker(Process):
    """A worker of ``role`` that serves ``model``, a name and its fingerprint."""

    def __init__(
        self,
        number: int,
        world: Any,
        role: Role,
        generation: int,
        model: tuple[str, Fingerprint] = (text.NAME, text.FINGERPRINT),
    ) -> None:
        super().__init__(f"worker-{number}", world.network)
        self.number, self.role, self.generation = number, role, generation
        self.model, self.fingerprint = model
        self.id = InstanceId(self.host)
        self.address = Address(self.host, PORT)
        self.hangs = self._computes = False
        self.slowness = 1.0
        self.draining = False
        self.alive_s = self.loop.time()
        self._world = world
        self._threads: Threads = world.threads
        self.run(self._open)

    def _open(self) -> None:
        plan, clock, loaded = self._world.plan, SystemClock(), text
        self.memory = bytearray(plan.num_blocks * loaded.LAYOUT.block_bytes)
        runner = text.TextRunner(
            loaded.LAYOUT,
            memoryview(self.memory),
            text.TIMING,
            text_ids=text.LETTERS,
            vocab=text.VOCAB,
            max_context=4096,
            checks=True,
            sleep=self._compute,
        )
        metrics = WorkerMetrics(CollectorRegistry(), text.LAYOUT, plan.num_blocks)
        speed = SpeedMeter(STEP_TOKENS, now_s=self._world.clock_s)
        reader = PeerReader(SimTransfers(self._world, self.host), self.id, self.fingerprint)  # type: ignore[arg-type]
        store = self._world.store.seen_by(self.host, self.fingerprint) if plan.has_store else None
        self.reader = reader
        blocks = HostBlocks(runner.cache)
        self.connector = KvConnector(store, reader, metrics, speed, text.LAYOUT, blocks)
        config = EngineCoreConfig(
            block_tokens=text.BLOCK_TOKENS,
            max_num_batched_tokens=STEP_TOKENS,
            max_num_seqs=plan.num_seqs,
            max_num_waiting=plan.num_waiting,
            moves_preempted=plan.moves_preempted,
            debug_checks=plan.checks,
        )
        self.core = EngineCore(runner, config, self.connector)
        self.reports = EngineReports(self._spread)
        self.thread = EngineThread(self.core, self.reports.put, self._engine_failed, speed, self.reports.call)
        self.connector.attach(self.thread)
        self.access = AccessTable(clock, LEASE_MS, len(self.memory), random_bytes=Random(self.generation).randbytes)
        identity = KvIdentity(self.id, self.generation, self.fingerprint, str(self.address))
        self.peers = PeerServer(identity, text.LAYOUT, blocks, self.access, clock, metrics, self.thread)
        service = FastService()
        self.peers.serve(service, self)  # type: ignore[arg-type]
        factory = RequestFactory(self.fingerprint, text.BLOCK_TOKENS, "xxh3_128", text.ASSETS.eos_ids)
        self.probe = EngineProbe(self.thread, factory.probe, clock)
        self.hub = SessionHub(
            self.id, self.generation, factory, self.thread, self.peers.add_exports, self.peers.release
        )
        self.hub.serve(service)
        self.beats = EngineBeats(self.thread.beat, self._is_alive)
        card = model_card(
            text.LAYOUT,
            text.ASSETS,
            model=self.model,
            fingerprint=self.fingerprint,
            block_hash="xxh3_128",
            context_length=self.core.scheduler.max_tokens,
            vocab_size=text.VOCAB,
        )
        WorkerCalls(card, self._drop_cached, self.probe.run, EndReply).serve(service)
        self.thread.start()
        self.background = [self.spawn(self.beats.run()), self.spawn(self.peers.sweep())]
        self.network.listen(str(self.address), functools.partial(_Port, service))
        self.discovery = MemoryDiscovery(self._world.instances)
        self.spawn(self.register())

    async def register(self) -> None:
        """Be found by conductors."""
        instance = Instance(self.id, self.role, self.address, generation=self.generation)
        self.registration = await self.discovery.register(instance, REGISTER_TTL_S)

    async def _drop_cached(self) -> int:
        return await self.thread.call(lambda core: core.pool.drop_cached())

    # --- what PeerServer asks of a segment server

    def descriptor(self) -> SegmentDescriptor:
        return SegmentDescriptor("kv", len(self.memory), self.host, self.generation, ())

    def maps(self, session_id: int) -> bool:
        """Nobody maps another host's memory."""
        return False

    # --- the engine

    def _compute(self, seconds: float) -> None:
        self._computes = True
        self._threads.sleep(seconds * self.slowness)
        while self.hangs:
            self._threads.sleep(_HANG_LOOK_S)
        self._computes = False

    def _spread(self, reports: Sequence[StepReport]) -> None:
        self.hub.on_reports(reports)
        for report in reports:
            self.probe.on_report(report)
        self.beats.on_report(reports[-1])

    def _engine_failed(self, error: BaseException) -> None:
        if self.alive:
            self._world.fail(error)

    def _is_alive(self) -> None:
        self.alive_s = self.loop.time()

    # --- ends

    def kill(self, *, silently: bool = False) -> None:
        if self.alive:
            super().kill(silently=silently)
            self.discovery.crash()

    async def drain(self, grace_s: float) -> None:
        """End in order, as on SIGTERM; the world starts it again."""
        self.draining = True
        await self.registration.close()
        self.hub.drain()
        try:
            async with asyncio.timeout(grace_s):
                await self.hub.idle.wait()
                await self.peers.idle.wait()
        except TimeoutError:
            pass
        self.hub.close()
        await asyncio.sleep(0.05)
        self.reports.close()
        await self._threads.run(self.thread.stop)
        await self._threads.run(self.connector.close)
        self.kill()

    def check(self) -> None:
        """Assert the invariants of all parts."""
        self.access.check()
        self.peers._exports.check()
        if not self._computes:  # else the engine is in the middle of a step
            self.core.scheduler.check()

    def check_idle(self) -> None:
        """Assert that nothing is left of any request."""
        core, hub = self.core, self.hub
        scheduler, pool = core.scheduler, core.scheduler.pool
        scheduler.check()
        left = {
            "requests": len(scheduler._requests),
            "pulls": len(scheduler.pulls),
            "exports held": len(scheduler.exports),
            "blocks in use": pool.num_in_use,
            "blocks in transfer": pool.num_in_transfer,
            "owned": hub.num_requests,
            "exports": len(self.peers._exports),
            "prefixes": len(self.peers._prefixes),
            "leases": self.access.num_leases,
            "pulls under way": len(self.core.pulls),
            "blocks on their way to the store": self.connector._pending_blocks,
            "probes": len(self.probe._waiting),
            "requests of sessions": sum(len(session.requests) for session in hub._sessions),
            "unsent": sum(len(session.outbox._outputs) for session in hub._sessions),
        }
        found = {name: count for name, count in left.items() if count}
        assert not found, f"{self.host} still has {found}"
        assert hub.idle.is_set()
        assert self.peers.idle.is_set()


class _Port(FastServerProtocol):
    """The fast lane behind its preamble, which the fast port reads in the product."""

    def __init__(self, service: FastService) -> None:
        super().__init__(service, Peer(None, False, "simulated"))
        self._begun = False

    def data_received(self, data: bytes) -> None:
        if not self._begun:
            self._begun = True
            data = data.removeprefix(PREAMBLE)
        if data:
            super().data_received(data)


class SimConnection:
    """The fast lane's blocking connection, as a worker's threads use it."""

    threads: Threads  # of the life that runs

    def __init__(self, address: Address, unix_path: str | None = None, tls: Any = None, dead_s: int = 0) -> None:
        self.peer = str(address)
        self._connection: AsyncFastConnection = self.threads.waiting_for(AsyncFastConnection.connect(address))

    @property
    def closed(self) -> bool:
        return self._connection.closed

    def call(self, method: int, request: Any, reply_type: Any, *, deadline_s: float = 5.0) -> Any:
        return self.threads.waiting_for(self._connection.call(method, request, reply_type, deadline_s=deadline_s))

    def call_many(self, calls: Sequence[Call[Any]], *, deadline_s: float = 5.0) -> list[Any]:
        """As the real one: errors of the peer in their place, those of the connection for all."""

        async def ask(call: Call[Any]) -> Any:
            try:
                return await self._connection.call(call.method, call.request, call.reply_type, deadline_s=deadline_s)
            except DeadlineExceeded:
                raise
            except TanghuluError as error:
                if self._connection.closed:
                    raise
                return error

        async def ask_all() -> list[Any]:
            return await asyncio.gather(*map(ask, calls))

        return self.threads.waiting_for(ask_all())

    def post(self, call: Call[Any], *, deadline_s: float = 5.0) -> None:
        async def send() -> None:
            self._connection.send(call.method, call.request, call.reply_type, lambda outcome: None)

        self.threads.waiting_for(send())

    def close(self) -> None:
        self._connection.abort()


class _Remote:
    """Another worker's memory, opened."""

    transport = "shm"  # a read is one step, under which no connection is watched

    def __init__(self, descriptor: SegmentDescriptor, session: SessionKey) -> None:
        self.host, self.generation, self.session_id = descriptor.host_id, descriptor.generation, session.session_id
        self.alive = True

    def close(self) -> None:
        self.alive = False


class SimTransfers:
    """What `PeerReader` asks of a transfer engine; it reads by the network."""

    def __init__(self, world: Any, host: str) -> None:
        self._world, self._host = world, host

    def open_segment(self, descriptor: SegmentDescriptor, session: SessionKey) -> _Remote:
        return _Remote(descriptor, session)

    def register(self, buffer: memoryview) -> memoryview:
        return buffer

    def transfer(self, requests: Sequence[Any], deadline_s: float) -> None:
        network: Network = self._world.network
        threads: Threads = self._world.threads
        rng: Random = self._world.rng
        for request in requests:
            remote: _Remote = request.target
            threads.sleep(network.latency_s(self._host, remote.host))
            if network.is_cut(self._host, remote.host):
                threads.sleep(min(deadline_s, network.reset_s))
                raise TransferFailed(f"{remote.host} does not answer")
            worker = self._world.workers[int(remote.host.partition("-")[2])]
            if not worker.alive or worker.generation != remote.generation:
                raise NodeUnavailable(f"{remote.host} is gone")
            self._read(worker, request)
            if rng.random() < self._world.plan.torn:
                request.source[:] = bytes(len(request.source))  # what came is not what was sent

    @staticmethod
    def _read(worker: SimWorker, request: Any) -> None:
        lease_id, end = LeaseId(request.lease_id), request.target_offset + request.length
        worker.access.begin(request.target.session_id, lease_id, request.opcode, request.target_offset, request.length)
        request.source[:] = memoryview(worker.memory)[request.target_offset : end]
        worker.peers.on_freed(worker.access.end(lease_id))
