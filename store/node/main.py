"""``tanghulu node``: the process. Opens segment and door, registers, announces, ends leases, closes cleanly."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog
from prometheus_client import CollectorRegistry

from tanghulu.auth.tenants import Tenant
from tanghulu.auth.tls import ServerTls
from tanghulu.auth.tokens import TokensFile
from tanghulu.discovery.base import Instance, Registration
from tanghulu.discovery.master import MasterDiscovery
from tanghulu.discovery.masters import MasterFinder
from tanghulu.errors import ConfigError
from tanghulu.eviction import POLICIES
from tanghulu.protos import store_pb2_grpc
from tanghulu.rpc.authorizer import Gate, GrpcGate
from tanghulu.rpc.fast_server import FastService
from tanghulu.rpc.latency import LatencyCollector
from tanghulu.rpc.port_mux import Door
from tanghulu.runtime import process as processes
from tanghulu.runtime.clock import SystemClock
from tanghulu.runtime.config import command, option
from tanghulu.runtime.master_options import DoorOptions, MasterOptions
from tanghulu.runtime.process import Process, ProcessConfig
from tanghulu.store.node.node_memory import NodeMemory
from tanghulu.store.node.replication.copier import Copier
from tanghulu.store.node.reporting import registration as registering
from tanghulu.store.node.reporting.copy_wire import Orders
from tanghulu.store.node.reporting.reporter import Announcer
from tanghulu.store.node.rpc import metrics
from tanghulu.store.node.rpc.admin_service import AdminService
from tanghulu.store.node.rpc.grpc_service import GrpcStoreNode
from tanghulu.store.node.rpc.metrics import NodeCollector, TrafficCounters
from tanghulu.store.node.rpc.service import NodeIdentity, NodeService
from tanghulu.store.node.rpc.sessions import Sessions
from tanghulu.store.node.rpc.stream_service import ArrivalService
from tanghulu.store.node.rpc.tenant_metrics import TenantCollector
from tanghulu.store.node.ssd.admission import MODES, TierAdmission
from tanghulu.store.node.ssd.metrics import TierCollector
from tanghulu.store.node.ssd.opening import MIN_SSD_BYTES, SsdPlace, open_tier, send_down
from tanghulu.store.node.ssd.promotion import Promoter
from tanghulu.store.node.ssd.tier import QUEUE_BYTES, SsdTier
from tanghulu.store.node.state.limits import Watermarks
from tanghulu.store.node.state.node_state import NodeState
from tanghulu.store.node.state.outcomes import EvictionReason
from tanghulu.store.node.state.tenant_usage import Policies, TenantBook, trim
from tanghulu.store.node.writes.puts import PutDesk
from tanghulu.store.node.writes.write_buffers import Desks
from tanghulu.store.protocol.access_rules import refuse_open_carriers
from tanghulu.store.protocol.methods import NODE_GRPC_RULES
from tanghulu.store.protocol.types import MAX_INLINE_BYTES
from tanghulu.transfer_engine.core.access import AccessTable
from tanghulu.transfer_engine.core.leases import Freed
from tanghulu.transfer_engine.metrics import ServerCollector
from tanghulu.transfer_engine.options import TransferOptions, transfer_settings
from tanghulu.transfer_engine.owner.server import SegmentServer
from tanghulu.types import Address, ChunkKey, Role, format_size

_log = structlog.get_logger(__name__)
_TICK_S = 0.05
#: How often desks are looked at while they are used.
_POLL_S = 0.002
#: How long a start waits for the master before it serves without it.
_FIRST_CONTACT_S = 2.0
#: What a node without an SSD tier evicts ahead of need in one tick.
_EVICT_AHEAD_BYTES = 64 << 20
#: Of the segment, what one client's mapped leases may hold; beyond it the client gets copies.
_MAX_MAPPED_FRACTION = 0.5


@dataclass(frozen=True, kw_only=True)
class NodeConfig(TransferOptions, MasterOptions, DoorOptions, ProcessConfig):
    """The options of ``tanghulu node``."""

    port: int = option(7410, "port to listen on; 0 picks one")
    memory: int = option(1 << 30, "size of the memory segment", size=True)
    max_value: int = option(0, "largest value that is taken; 0: what fits into the memory", size=True)
    eviction: str = option("lru", "who goes first when room is needed", choices=tuple(POLICIES))
    high_watermark: float = option(
        0.0, "fraction of memory above which chunks are evicted ahead of need; 0: 0.95 with an SSD tier, else never"
    )
    low_watermark: float = option(0.0, "fraction of memory at which that ends; 0: 0.05 below the high one")
    ssd_path: Path | None = option(None, "file of the SSD tier, or a directory for it; default: no SSD tier")
    ssd_size: int = option(0, "size of the SSD tier's file", size=True)
    ssd_admission: str = option("all", "which evicted chunks go to the SSD", choices=MODES)
    ssd_write_rate: int = option(0, "bytes a second that may be written to the SSD; 0: no limit", size=True)
    tokens: Path | None = option(None, "let in only whoever shows one of the tokens in this file")
    lease_ms: int = option(10_000, "how long a reservation or a pin lasts")
    prefault: bool = option(False, "touch the whole segment at the start")
    debug_checks: bool = option(False, "assert all invariants of the node twenty times a second")

    def __post_init__(self) -> None:
        DoorOptions.__post_init__(self)
        if self.max_value and self.max_value < MAX_INLINE_BYTES:
            raise ConfigError(f"--max-value {self.max_value} is less than {format_size(MAX_INLINE_BYTES)}")
        if self.memory < 4096:
            raise ConfigError(f"--memory {self.memory} is less than one page")
        if self.lease_ms < 10:
            raise ConfigError(f"--lease-ms {self.lease_ms} is too short for anybody to use a lease")
        if (self.ssd_path is None) != (self.ssd_size == 0):
            raise ConfigError("--ssd-path and --ssd-size come together: where, and how much")
        if self.ssd_path is not None and self.ssd_size < MIN_SSD_BYTES:
            raise ConfigError(f"--ssd-size {format_size(self.ssd_size)} is less than {format_size(MIN_SSD_BYTES)}")
        low, high = self.watermarks
        if not 0 < low <= high <= 1:
            raise ConfigError(f"--low-watermark {low} and --high-watermark {high}: 0 < low <= high <= 1")

    @property
    def watermarks(self) -> tuple[float, float]:
        """(low, high), as fractions of the memory."""
        high = self.high_watermark or (1.0 if self.ssd_path is None else 0.95)
        return self.low_watermark or high - 0.05, high


class Node:
    """All parts of one node, wired together."""

    def __init__(self, process: Process, config: NodeConfig) -> None:
        self._process = process
        self._config = config
        self._clock = SystemClock()
        self._service = FastService(max_connections=config.max_connections)
        tls = config.server_tls()
        self._tokens = None if config.tokens is None else TokensFile(config.tokens)
        if self._tokens is not None:
            refuse_open_carriers(self._tokens.table, config.transports)
        interceptors = () if self._tokens is None else (GrpcGate(self._tokens, NODE_GRPC_RULES),)
        self._door = Door(self._service, process.run_dir, "node", interceptors, tls)
        book = None if self._tokens is None else TenantBook(self._tenants, config.memory)
        self._policies = Policies() if book is None else Policies.fair(book)
        self._memory = NodeMemory(config.memory, self._clock.now_s(), prefault=config.prefault)
        self._segment = self._memory.segment
        access = AccessTable(self._clock, config.lease_ms, int(config.memory * _MAX_MAPPED_FRACTION))
        self.state = NodeState(config.memory, access, lambda: self._policies.memory(config.eviction), self._clock)
        self.state.table.book = book
        self.state.max_value_bytes = min(config.max_value or config.memory, config.memory)
        self.state.table.published = self._memory.published
        self._segment_server = self._make_segment_server(access, tls)
        self._tier = self._open_tier()
        self._promoter = None if self._tier is None else Promoter(self.state, self._tier, self._segment.view)
        low, high = config.watermarks
        self._watermarks = Watermarks(config.memory, high, low)
        self._traffic = TrafficCounters()
        self._masters = MasterFinder(config.master)
        self._discovery: MasterDiscovery | None = None
        self._announcer = Announcer(
            self.state, self._masters, process.generation, self._room_changed, self._not_registered, self._ordered
        )
        self._desks = Desks(
            self.state, self._segment.view, self._memory.desks_begin, self._clock.now_s, self._announcer.displaced
        )
        self.state.desks = self._desks
        self._polling: asyncio.TimerHandle | None = None
        self._desk = PutDesk(self.state, self._segment.view, self._announcer)
        self._arrivals = ArrivalService(
            process.generation, self.state, self._desk, self._traffic, self._announcer.displaced
        )
        self._sessions = Sessions(self.state, self._room_changed)
        self._copier = Copier(config.master, self._desk, self._announcer.copy_failed)
        self._registration: asyncio.Task[Registration] | None = None
        self._gate: Gate | None = None
        store_pb2_grpc.add_StoreNodeServicer_to_server(
            GrpcStoreNode(self.state, self._desk, self._traffic, self._promoter), self._door.grpc_server
        )
        self._register_metrics(process.registry, book)

    def _make_segment_server(self, access: AccessTable, tls: ServerTls | None) -> SegmentServer:
        config = self._config
        settings = transfer_settings(config, config.host)
        return SegmentServer(
            self._segment,
            access,
            host=config.host,
            advertised_host=config.reachable_host,
            unix_path=str(self._process.run_dir / "segment.sock") if "shm" in settings.transports else None,
            generation=self._process.generation,
            host_id=processes.host_id(),
            on_freed=self._freed,
            tls=None if tls is None else tls.context,
            **settings.served,
        )

    def _open_tier(self) -> SsdTier | None:
        config = self._config
        if config.ssd_path is None:
            return None
        place = SsdPlace(config.ssd_path, config.ssd_size, config.port)
        admission = TierAdmission(config.ssd_admission, QUEUE_BYTES, config.ssd_write_rate)
        policy = partial(self._policies.tier, config.eviction)
        return open_tier(place, self.state, self._segment.view, admission, policy, self._clock)

    def _register_metrics(self, registry: CollectorRegistry, book: TenantBook | None) -> None:
        if self._tier is not None:
            registry.register(TierCollector(self.state, self._tier))
        if book is not None:
            registry.register(TenantCollector(book.usage))
        registry.register(ServerCollector(self._segment_server))
        registry.register(LatencyCollector(self._service.latencies))
        registry.register(metrics.wait_collector(self._desk.waits))
        metrics.register(registry, NodeCollector(self.state, self._all_traffic, lambda: len(self._sessions)))

    async def run(self) -> None:
        """Serve until the process is told to stop."""
        tasks: list[asyncio.Task[None]] = []
        try:
            if self._tier is not None:
                await self._tier.recover()
            if self._promoter is not None:
                self._promoter.bring_up_pinned()
            address = await self._open()
            async with MasterDiscovery(self._config.master, finder=self._masters) as discovery:
                self._discovery = discovery
                entering = asyncio.create_task(registering.register(discovery, self._instance(address)))
                self._registration = entering
                await asyncio.wait([entering], timeout=_FIRST_CONTACT_S)
                registering.raise_refusal(entering)
                instance_id = self._process.instance_id(address.port)
                running = [self._announcer.run(instance_id), self._tick(), self._copier.run()]
                if self._gate is not None:
                    running.append(self._gate.watch(self._service))
                tasks += [asyncio.create_task(each) for each in running]
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._announcer.connected.wait(), _FIRST_CONTACT_S)
                self._process.ready(instance_id, address)
                await _until_stopping(self._process.stopping, tasks)
                await registering.unregister(entering)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._polling is not None:
                self._polling.cancel()
            await self._door.close(grace_s=0.2)
            await self._segment_server.close()
            self._sessions.close()
            self._desks.drain()
            self.state.table.published.close()
            if self._promoter is not None and self._tier is not None:
                await self._promoter.close()
                await send_down(self.state, self._tier)
                await self._tier.close()
            self._segment.close()

    async def _open(self) -> Address:
        try:
            await self._segment_server.start()
        except OSError as error:
            raise ConfigError(f"cannot serve the segment on {self._config.host}: {error}") from error
        address = await self._door.start(self._config.host, self._config.port, self._config.reachable_host)
        identity = NodeIdentity(
            self._process.instance_id(address.port),
            self._process.generation,
            self._segment_server.descriptor(),
            self._memory.index,
        )
        NodeService(
            identity, self.state, self._desk, self._sessions, self._traffic, self._promoter, self._policies
        ).serve(self._service)
        self._arrivals.serve(self._service)
        AdminService(self.state, self._desk, self._drain).serve(self._service)
        if self._tokens is not None:
            self._gate = Gate(self._tokens)
            self._gate.guard(self._service)
        return address

    def _tenants(self) -> Mapping[str, Tenant]:
        assert self._tokens is not None, "a node without tokens has no tenants"
        return self._tokens.table.tenants

    def _instance(self, address: Address) -> Instance:
        return Instance(
            id=self._process.instance_id(address.port),
            role=Role.NODE,
            address=address,
            namespace=self._config.namespace,
            metrics_address=self._process.metrics_address,
            place=self._config.place,
            generation=self._process.generation,
            unix_path=self._door.unix_path,
            attributes={"memory_bytes": str(self._config.memory), "host_id": processes.host_id()}
            | ({"draining": "true"} if self.state.draining else {}),
        )

    async def _drain(self, draining: bool) -> None:
        """Take no new chunks, or take them again, and have the master know. Raises MasterUnavailable; it follows."""
        self.state.draining = draining
        self._room_changed()
        if self._registration is not None:
            registration = await asyncio.shield(self._registration)
            await registration.update(self._instance(self._door.address))

    def _ordered(self, orders: Orders) -> None:
        """The master wants chunks copied here, or dropped because others hold them now."""
        self._desks.drain()
        self._copier.order(orders)
        for key, version in orders.drops:
            self.state.let_go(ChunkKey(key), version)
        self._room_changed()

    def _freed(self, freed: Sequence[Freed]) -> None:
        self.state.freed(freed)
        self._room_changed()

    def _not_registered(self) -> None:
        if self._discovery is not None:
            self._discovery.poke()

    def _room_changed(self) -> None:
        self._desk.room_changed()
        if self._promoter is not None:
            self._promoter.room_changed()

    def _all_traffic(self) -> TrafficCounters:
        traffic = self._traffic
        traffic.bytes_read["tcp"] = self._segment_server.bytes_read["tcp"]
        traffic.bytes_written["desk"] = self._desks.bytes_taken
        traffic.bytes_written["tcp"] = self._segment_server.bytes_written["tcp"]
        return traffic

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self.state.expire(self._clock.now_s())
            self.state.table.published.beat(self._clock.now_s())
            self._sessions.forget_ended()
            self._arrivals.tick()
            self._empty_desks()
            trim(self.state)
            self._evict_ahead()
            self._room_changed()
            self._announcer.tick()
            if self._config.debug_checks:
                self.state.check()
                self._watermarks.check()
                if self._tier is not None:
                    self._tier.check()
                self._sessions.check()
                self._desks.check()
                self._arrivals.arrivals.check()
                self._announcer.check()

    def _empty_desks(self) -> None:
        """At every tick, and while clients put, much more often: it keeps what a get has to wait for short."""
        busy = self._desks.tick(self._clock.now_s())
        if busy and self._polling is None:
            self._polling = asyncio.get_running_loop().call_later(_POLL_S, self._poll_desks)

    def _poll_desks(self) -> None:
        self._polling = None
        self._empty_desks()
        self.state.table.published.flush()

    def _evict_ahead(self) -> None:
        budget = _EVICT_AHEAD_BYTES if self._tier is None else self._tier.free_queue_bytes
        wanted = self._watermarks.wanted(self.state.used_bytes, budget)
        for chunk in self.state.room.oldest(wanted):
            self.state.evict(chunk, EvictionReason.WATERMARK)


async def _until_stopping(stopping: asyncio.Event, tasks: list[asyncio.Task[None]]) -> None:
    """Until the process is to stop, or one of its tasks fails: a node that announces nothing must not live on."""
    waiting = asyncio.create_task(stopping.wait())
    done, _ = await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    for task in done - {waiting}:
        task.result()


async def serve(process: Process, config: NodeConfig) -> None:
    """Serve the node until the process is told to stop."""
    await Node(process, config).run()


COMMAND = command(
    "node",
    NodeConfig,
    lambda config: processes.run(Role.NODE, config, serve),
    "Run a store node: memory that holds chunks.",
)
