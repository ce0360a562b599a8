"""``tanghulu node``: the process. Opens segment and port, registers, reports, ends leases, closes cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from prometheus_client import CollectorRegistry

from tanghulu.auth.tenants import Tenant
from tanghulu.auth.tls import ServerTls
from tanghulu.auth.tokens import TokensFile
from tanghulu.discovery.base import HOLDS_NOTHING, Instance, Registration
from tanghulu.discovery.entering import enter, instance_of, meet
from tanghulu.discovery.master import MasterDiscovery
from tanghulu.discovery.masters import MasterFinder
from tanghulu.errors import ConfigError, TanghuluError
from tanghulu.eviction import POLICIES
from tanghulu.rpc.authorizer import Authorizer
from tanghulu.rpc.fast_port import DESCRIPTORS_PER_CONNECTION, FastPort
from tanghulu.rpc.fast_server import FastService
from tanghulu.rpc.latency import LatencyCollector
from tanghulu.runtime import process as processes
from tanghulu.runtime.clock import SystemClock
from tanghulu.runtime.config import command, option
from tanghulu.runtime.kv_events import KvEventOptions, publishing
from tanghulu.runtime.limits import allow_descriptors, refuse_too_much
from tanghulu.runtime.master_options import MasterOptions, PortOptions
from tanghulu.runtime.process import Process, ProcessConfig, StoppedEarly
from tanghulu.runtime.tasks import cancelled
from tanghulu.store.node.reporting.kv_events import HeldBlocks
from tanghulu.store.node.reporting.reporter import Reporter
from tanghulu.store.node.rpc.admin_service import AdminService
from tanghulu.store.node.rpc.metrics import (
    NodeCollector,
    TenantCollector,
    TierCollector,
    TrafficCounters,
    wait_collector,
)
from tanghulu.store.node.rpc.service import NodeIdentity, NodeService
from tanghulu.store.node.rpc.sessions import Sessions
from tanghulu.store.node.ssd.admission import MODES, TierAdmission
from tanghulu.store.node.ssd.promotion import Promoter
from tanghulu.store.node.ssd.tier import MIN_SSD_BYTES, QUEUE_BYTES, SsdPlace, SsdTier, open_tier
from tanghulu.store.node.state.chunk_table import Published
from tanghulu.store.node.state.limits import Watermarks
from tanghulu.store.node.state.node_chunks import MAX_AHEAD
from tanghulu.store.node.state.node_state import NodeState, make_node_state
from tanghulu.store.node.state.ssd_chunk import SsdChunk
from tanghulu.store.node.state.tenant_usage import Policies, TenantUsage
from tanghulu.store.node.state.write_buffers import AREA_BYTES
from tanghulu.store.node.writes.copier import Copier
from tanghulu.store.node.writes.puts import PutService
from tanghulu.store.protocol.access_rules import refuse_open_carriers
from tanghulu.store.protocol.announcements import Orders
from tanghulu.store.protocol.shared_index import MAX_SILENCE_S, IndexPlace, IndexWriter, index_bytes, num_buckets_for
from tanghulu.store.protocol.types import MAX_INLINE_BYTES
from tanghulu.transfer_engine.core.access import AccessTable, Freed
from tanghulu.transfer_engine.core.segment import MemorySegment
from tanghulu.transfer_engine.metrics import ServerCollector
from tanghulu.transfer_engine.options import TransferOptions, transfer_settings
from tanghulu.transfer_engine.server import SegmentServer
from tanghulu.types import Address, ChunkKey, InstanceId, Role, format_size

_log = structlog.get_logger(__name__)
_TICK_S = 0.05
_CHECK_S = 0.5
#: Interval of checks of write buffers in use.
_POLL_S = 0.002
#: Seconds that a start waits for a master that went away meanwhile before it serves without it.
_FIRST_CONTACT_S = 2.0
#: Bytes evicted ahead of demand in one tick: without an SSD tier, and with one, to which all of it is copied.
_EVICT_AHEAD_BYTES, _SEND_AHEAD_BYTES = 64 << 20, 16 << 20
#: Chunks demoted to the SSD per tick: each costs the loop a tenth of a millisecond.
_SEND_AHEAD_CHUNKS = 64
#: Part of the segment that mapped leases of one client, and those of all together, may hold; beyond it clients get
#: copies.
_MAX_MAPPED_FRACTION, _MAX_MAPPED_TOGETHER = 0.5, 0.75
#: Part of a newly used range touched at once: 20 ms of the loop if all of it is new.
_MOST_TOUCHED_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class NodeConfig(KvEventOptions, TransferOptions, MasterOptions, PortOptions, ProcessConfig):
    """The options of ``tanghulu node``."""

    port: int = option(7410, "port to listen on; 0 picks one")
    memory: int = option(1 << 30, "size of the memory segment", size=True)
    max_value: int = option(0, "largest accepted value; 0 accepts what fits into memory", size=True)
    eviction: str = option("reuse", "eviction policy of chunks", choices=tuple(POLICIES))
    ssd_path: Path | None = option(None, "file of the SSD tier, or a directory for it; default: no SSD tier")
    ssd_size: int = option(0, "size of the SSD tier's file", size=True)
    ssd_admission: str = option("all", "evicted chunks that go to the SSD", choices=MODES)
    ssd_write_rate: int = option(0, "limit on bytes per second written to the SSD; 0 disables it", size=True)
    prefault: bool = option(False, "touch the whole segment at startup")
    lease_ms: int = option(10_000, "duration of a reservation or a pin, in milliseconds", least=10, debug=True)
    checks: bool = option(False, "assert all invariants of the node twenty times a second", debug=True)

    def __post_init__(self) -> None:
        PortOptions.__post_init__(self)
        KvEventOptions.__post_init__(self)
        if self.max_value and self.max_value < MAX_INLINE_BYTES:
            raise ConfigError(f"--max-value {self.max_value} is less than {format_size(MAX_INLINE_BYTES)}")
        if self.memory < 4096:
            raise ConfigError(f"--memory {self.memory} is less than one page; give at least 4KiB")
        if (self.ssd_path is None) != (self.ssd_size == 0):
            raise ConfigError("give --ssd-path and --ssd-size together, or neither")
        if self.ssd_path is not None and self.ssd_size < MIN_SSD_BYTES:
            raise ConfigError(f"--ssd-size {format_size(self.ssd_size)} is less than {format_size(MIN_SSD_BYTES)}")

    @property
    def watermarks(self) -> tuple[float, float]:
        """(low, high), as fractions of the memory."""
        high = 1.0 if self.ssd_path is None else 0.95
        return high - 0.05, high


class NodeMemory:
    """The memory offered by a node, and its layout. ``prefault`` touches all of it now.

    The segment: values, ``memory_bytes`` | heads and records of write buffers. Beside it the shared index, which is
    read-only for clients.
    """

    def __init__(self, memory_bytes: int, now_s: float, *, prefault: bool) -> None:
        self.buffers_begin = -(-memory_bytes // 64) * 64
        self.index = IndexPlace(0, num_buckets_for(memory_bytes), secrets.randbits(64))
        self.segment = MemorySegment.create(
            "store",
            self.buffers_begin + AREA_BYTES,
            prefault=prefault,
            published_bytes=index_bytes(self.index.num_buckets),
        )
        self._is_touched = prefault
        assert self.segment.published is not None
        self.published = Published(IndexWriter(self.segment.published.view, self.index.seed, now_s))

    def touch(self, offset: int, length: int) -> None:
        """Touch a range before a client writes it; for a very long one the first part, in time."""
        if not self._is_touched:
            self.segment.touch(offset, min(length, _MOST_TOUCHED_BYTES))


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
        self._port = FastPort(self._service, process.run_dir, "node", tls)
        tenants = None if self._tokens is None else TenantUsage(self._tenants, config.memory)
        self._policies = Policies() if tenants is None else Policies.fair(tenants)
        refuse_too_much(config.memory, "--memory")
        self._memory = NodeMemory(config.memory, self._clock.now_s(), prefault=config.prefault)
        self._segment = self._memory.segment
        access = AccessTable(
            self._clock,
            config.lease_ms,
            int(config.memory * _MAX_MAPPED_FRACTION),
            max_quarantined_bytes=int(config.memory * _MAX_MAPPED_TOGETHER),
        )
        self._tier: SsdTier | None = None
        self.state = self._make_state(access, tenants)
        self._chunks = self.state.chunks
        self._segment_server = self._make_segment_server(access, tls)
        self._promoter = None if self._tier is None else Promoter(self.state, self._tier, self._segment.view)
        low, high = config.watermarks
        self._watermarks = Watermarks(config.memory, high, low)
        self._traffic = TrafficCounters()
        self._masters = MasterFinder(config.master)
        self._discovery: MasterDiscovery | None = None
        self._reporter = Reporter(
            self.state, self._masters, process.generation, self._room_changed, self._not_registered, self._ordered
        )
        self._polling: asyncio.TimerHandle | None = None
        self._puts = PutService(self.state, self._segment.view, self._reporter)
        self._sessions = Sessions(self.state, self._room_changed)
        self._copier = Copier(config.master, self._puts, self._reporter.copy_failed)
        self._registration: asyncio.Task[Registration] | None = None
        self._authorizer: Authorizer | None = None
        self._held: HeldBlocks | None = None
        self._register_metrics(process.registry, tenants)

    def _make_state(self, access: AccessTable, tenants: TenantUsage | None) -> NodeState:
        config = self._config
        return make_node_state(
            config.memory,
            access,
            partial(self._policies.memory, config.eviction),
            self._clock,
            generation=self._process.generation,
            max_value_bytes=min(config.max_value or config.memory, config.memory),
            published=self._memory.published,
            tenants=tenants,
            buffer_memory=(self._segment.view, self._memory.buffers_begin),
            on_taken=self._memory.touch,
            make_tier=None if config.ssd_path is None else partial(self._open_tier, config.ssd_path),
        )

    def _make_segment_server(self, access: AccessTable, tls: ServerTls | None) -> SegmentServer:
        config = self._config
        settings = transfer_settings(config, config.host)
        return SegmentServer(
            self._segment,
            access,
            generation=self._process.generation,
            host_id=processes.host_id(),
            listen=replace(
                settings.listen,
                advertised_host=config.reachable_host,
                unix_path=str(self._process.run_dir / "segment.sock"),
                tls=None if tls is None else tls.context,
            ),
            limits=settings.limits,
            on_freed=self._freed,
        )

    def _open_tier(self, path: Path, on_lost: Callable[[SsdChunk], None]) -> SsdTier:
        config = self._config
        place = SsdPlace(path, config.ssd_size, config.port)
        admission = TierAdmission(config.ssd_admission, QUEUE_BYTES, config.ssd_write_rate)
        policy = partial(self._policies.tier, config.eviction)
        self._tier = open_tier(place, self._segment.view, admission, policy, self._clock, on_lost)
        return self._tier

    def _register_metrics(self, registry: CollectorRegistry, tenants: TenantUsage | None) -> None:
        if self._tier is not None:
            registry.register(TierCollector(self.state.counters, self._tier))
        if tenants is not None:
            registry.register(TenantCollector(tenants.usage))
        registry.register(ServerCollector(self._segment_server))
        registry.register(LatencyCollector(self._service.latencies))
        registry.register(wait_collector(self._puts.waits))
        registry.register(NodeCollector(self.state, self._all_traffic, lambda: len(self._sessions)))

    async def run(self) -> None:
        """Serve until the process is stopped."""
        config = self._config
        allow_descriptors(DESCRIPTORS_PER_CONNECTION * config.max_connections + config.max_data_connections)
        tasks: list[asyncio.Task[None]] = []
        try:
            async with (
                publishing(config.event_endpoints) as publish,
                MasterDiscovery(self._config.master, finder=self._masters) as discovery,
            ):
                if publish is not None:
                    self._held = HeldBlocks(publish, has_ssd=self._tier is not None)
                    self.state.reports.watch = self._held.changed
                await self._process.unless_stopping(meet(discovery))
                if self._tier is not None:
                    await self._tier.populate()
                    await self._tier.recover()
                if self._promoter is not None:
                    self._promoter.bring_up_pinned()
                address = await self._open()
                self._discovery = discovery
                first = {} if self._chunks.all_keys() else {HOLDS_NOTHING: "true"}
                entering = asyncio.create_task(enter(discovery, self._instance(address, first)))
                self._registration = entering
                await asyncio.wait([entering], timeout=_FIRST_CONTACT_S)
                if entering.done():
                    entering.result()  # a node that the master will never admit does not start
                instance_id = self._process.instance_id(address.port)
                tasks += [asyncio.create_task(each) for each in self._background(instance_id)]
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._reporter.connected.wait(), _FIRST_CONTACT_S)
                self._process.ready(instance_id, address)
                with contextlib.suppress(StoppedEarly):
                    waiting = asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                    for task in (await self._process.unless_stopping(waiting))[0]:
                        task.result()  # a node that cannot report must not keep running
                await _leave(entering)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._polling is not None:
                self._polling.cancel()
            await self._port.close(grace_s=0.2)
            await self._segment_server.close()
            self._sessions.close()
            self.state.drain_buffers()
            self._memory.published.close()
            if self._promoter is not None and self._tier is not None:
                await self._promoter.close()
                await self._promoter.send_down()
                await self._tier.close()
            self._segment.close()

    def _background(self, instance_id: InstanceId) -> Iterator[Coroutine[Any, Any, None]]:
        """Yield what runs beside the service."""
        yield from (self._reporter.run(instance_id), self._tick(), self._copier.run())
        if self._authorizer is not None:
            yield self._authorizer.watch(self._service)
        if self._config.checks:
            yield self._check()

    async def _open(self) -> Address:
        try:
            await self._segment_server.start()
        except OSError as error:
            places = f"{self._config.host} and {self._process.run_dir}/segment.sock"
            raise ConfigError(f"cannot serve the segment on {places}: {error}") from error
        address = await self._port.start(self._config.host, self._config.port, self._config.reachable_host)
        identity = NodeIdentity(
            self._process.instance_id(address.port),
            self._process.generation,
            self._segment_server.descriptor(),
            self._memory.index,
        )
        NodeService(
            identity, self.state, self._puts, self._sessions, self._traffic, self._promoter, self._policies
        ).serve(self._service)
        AdminService(self.state, self._puts, self._drain).serve(self._service)
        if self._tokens is not None:
            self._tokens.answer_at(address, Address(self._config.host, address.port), unix_path=self._port.unix_path)
            self._authorizer = Authorizer(self._tokens)
            self._authorizer.authorize(self._service)
        return address

    def _tenants(self) -> Mapping[str, Tenant]:
        assert self._tokens is not None, "a node without tokens has no tenants"
        return self._tokens.table.tenants

    def _instance(self, address: Address, first: Mapping[str, str] | None = None) -> Instance:
        """Return this node's registration; ``first``: attributes of the first time."""
        attributes = {"memory_bytes": str(self._config.memory), "host_id": processes.host_id(), **(first or {})}
        if self.state.draining:
            attributes["draining"] = "true"
        return instance_of(self._process, address, unix_path=self._port.unix_path, attributes=attributes)

    async def _drain(self, draining: bool) -> None:
        """Refuse new chunks, or accept them again, and inform the master, later if this raises MasterUnavailable."""
        self.state.drain(draining)
        self._room_changed()
        if self._registration is not None:
            registration = await asyncio.shield(self._registration)
            await registration.update(self._instance(self._port.address))

    def _ordered(self, orders: Orders) -> None:
        """Execute the master's orders: copy chunks here, or drop those removed elsewhere or held by others now."""
        self.state.drain_buffers()
        self._copier.order(orders)
        for key, version, removed in orders.drops:
            self._chunks.let_go(ChunkKey(key), version, removed=removed)
        self._room_changed()

    def _freed(self, freed: Sequence[Freed]) -> None:
        self.state.leases.freed(freed)
        self._room_changed()

    def _not_registered(self) -> None:
        if self._discovery is not None:
            self._discovery.poke()

    def _room_changed(self) -> None:
        self._puts.room_changed()
        if self._promoter is not None:
            self._promoter.room_changed()

    def _all_traffic(self) -> TrafficCounters:
        traffic = self._traffic
        traffic.bytes_read["tcp"] = self._segment_server.bytes_read["tcp"]
        traffic.bytes_written["write_buffer"] = self.state.buffers.bytes_taken
        traffic.bytes_written["tcp"] = self._segment_server.bytes_written["tcp"]
        return traffic

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self.state.expire(self._clock.now_s())
            self._give_sign_of_life()
            self._sessions.forget_ended()
            self._puts.incoming.tick()
            self._drain_buffers()
            self._chunks.trim_tenants()
            self._evict_ahead()
            self._room_changed()
            self._reporter.tick()
            if self._held is not None:
                self._held.flush()

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_S)
            self.state.check()
            self._watermarks.check()
            if self._tier is not None:
                self._tier.check()
            self._sessions.check()
            self._puts.incoming.check()

    def _give_sign_of_life(self) -> None:
        """Keep the index valid for readers, unless the master may have given this node up and sends it no removals."""
        now_s, published = self._clock.now_s(), self._memory.published
        if self._discovery is not None and self._discovery.is_listed(now_s + MAX_SILENCE_S):
            published.beat(now_s)
        else:
            published.flush()

    def _drain_buffers(self) -> None:
        """Make chunks of clients' writes: at every tick, and far more often while they put."""
        busy = self.state.tick_buffers(self._clock.now_s())
        if busy and self._polling is None:
            self._polling = asyncio.get_running_loop().call_later(_POLL_S, self._poll_buffers)

    def _poll_buffers(self) -> None:
        self._polling = None
        self._drain_buffers()
        self._memory.published.flush()

    def _evict_ahead(self) -> None:
        budget, max_num = _EVICT_AHEAD_BYTES, MAX_AHEAD
        if self._tier is not None:
            budget, max_num = min(self._tier.free_queue_bytes, _SEND_AHEAD_BYTES), _SEND_AHEAD_CHUNKS
        self._chunks.evict_ahead(self._watermarks.wanted(self._chunks.used_bytes, budget), max_num)


async def _leave(entering: asyncio.Task[Registration]) -> None:
    """Deregister the node, or stop trying to register it."""
    if not entering.done():
        await cancelled(entering)
        return
    with contextlib.suppress(TanghuluError):
        await entering.result().close()


async def serve(process: Process, config: NodeConfig) -> None:
    """Serve the node until the process is stopped."""
    await Node(process, config).run()


COMMAND = command(
    "node",
    NodeConfig,
    lambda config: processes.run(Role.NODE, config, serve),
    "Run a store node: memory that holds chunks.",
)
