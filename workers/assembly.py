"""Puts a worker together: model, cache in shared memory, engine thread, connector, peers, sessions, port.

The one place that knows all parts; each of them knows only its neighbours' interfaces.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

import grpc.aio
import structlog

from tanghulu.errors import TanghuluError
from tanghulu.protos import common_pb2, session_pb2, session_pb2_grpc
from tanghulu.rpc import grpc_edge
from tanghulu.rpc.fast_server import FastService
from tanghulu.rpc.port_mux import PortMux
from tanghulu.runtime.clock import SystemClock
from tanghulu.runtime.process import Process, host_id
from tanghulu.runtime.tasks import beside
from tanghulu.transfer_engine.core.access import AccessTable
from tanghulu.transfer_engine.core.segment import MemorySegment
from tanghulu.transfer_engine.engine import TransferEngine
from tanghulu.transfer_engine.metrics import EngineCollector, ServerCollector
from tanghulu.transfer_engine.options import transfer_settings
from tanghulu.transfer_engine.owner.server import SegmentServer
from tanghulu.types import Address, BlockHash, RequestId
from tanghulu.workers.config import WorkerConfig
from tanghulu.workers.engine.engine import EngineCore, EngineCoreConfig
from tanghulu.workers.engine.grammar import GrammarCompiler
from tanghulu.workers.engine.kv_layout import KvMemory
from tanghulu.workers.engine.probe import EngineProbe
from tanghulu.workers.engine.speed import SpeedMeter
from tanghulu.workers.engine.step_plan import KvExport
from tanghulu.workers.engine.thread import EngineThread, StepReport
from tanghulu.workers.kv.connector import ConnectorConfig, KvConnector
from tanghulu.workers.kv.peer_reader import PeerReader
from tanghulu.workers.kv.peer_server import KvIdentity, PeerServer
from tanghulu.workers.kv.ports import HostBlocks, KvPorts
from tanghulu.workers.kv.store_adapter import StoreAdapter
from tanghulu.workers.loading.loaded_model import LoadedModel
from tanghulu.workers.metrics import WorkerMetrics
from tanghulu.workers.sessions.beats import EngineBeats
from tanghulu.workers.sessions.server import SessionHub
from tanghulu.workers.sessions.wire import RequestFactory, model_card

_log = structlog.get_logger(__name__)
_LEASE_MS = 20_000
_MAX_PROBE_S = 300.0


class WorkerServer:
    """A running worker; an async context manager."""

    def __init__(self, process: Process, config: WorkerConfig, loaded: LoadedModel) -> None:
        self._process = process
        self._config = config
        self._loaded = loaded
        self._stack = contextlib.AsyncExitStack()
        self.model_name = loaded.name
        self.address = Address("", 0)
        self.unix_path = ""
        self.instance_id = process.instance_id(config.port)

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            await self._open(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _open(self, stack: contextlib.AsyncExitStack) -> None:
        """Open the parts bottom up: memory, engine, its connections to the outside, and the port last."""
        process, config = self._process, self._config
        service = FastService()
        port = PortMux(service, process.run_dir, "worker")
        self.address = await port.bind(config.host, config.port, config.reachable_host)
        self.unix_path = port.unix_path
        self.instance_id = process.instance_id(self.address.port)
        core, connector = self._engine(stack)
        self._thread = EngineThread(core, self._report_from_thread, self._engine_failed, self._speed)
        connector.attach(core, self._kv.port, self._thread.post)
        await self._peers_in(stack, service, core)
        factory = self._request_factory(core)
        self._probe = EngineProbe(self._thread, factory.probe, SystemClock())
        self._hub = SessionHub(
            self.instance_id,
            process.generation,
            factory,
            self._thread,
            self._peers.add_exports,
            self._peers.release,
        )
        self._beats = EngineBeats(self._thread, process.alive)
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        stack.callback(self._thread.stop)
        await stack.enter_async_context(beside(self._beats.run()))
        session_pb2_grpc.add_WorkerServicer_to_server(
            _Servicer(self._hub, self._thread, self._card(core), self._probe, self._end), port.grpc_server
        )
        await port.open()
        stack.push_async_callback(port.close)
        stack.callback(self._hub.close)

    def _engine(self, stack: contextlib.AsyncExitStack) -> tuple[EngineCore, KvConnector]:
        config, loaded = self._config, self._loaded
        num_blocks = loaded.layout.num_blocks_in(config.kv_memory)
        size = num_blocks * loaded.layout.block_bytes if loaded.staging is None else loaded.staging.segment_bytes
        self._segment = MemorySegment.create(f"kv-{self.instance_id}", size)
        stack.callback(self._segment.close)
        self._metrics = WorkerMetrics(
            self._process.registry, block_bytes=loaded.layout.block_bytes, num_blocks=num_blocks
        )
        self._transport = transfer_settings(config, config.host)
        transfers = TransferEngine(
            transports=self._transport.transports,
            host_id=host_id(),
            clock=SystemClock(),
            config=self._transport.engine,
        )
        stack.callback(transfers.close)
        self._process.registry.register(EngineCollector(transfers))
        reader = PeerReader(transfers, self.instance_id, loaded.fingerprint)
        stack.callback(reader.close)
        store = None
        if config.store:
            store = StoreAdapter(config.master, loaded.fingerprint, loaded.layout.layer_bytes, loaded.layout.num_parts)
            stack.callback(store.close)
        self._speed = SpeedMeter(config.max_num_batched_tokens, config.peer_fetch)
        bounds = ConnectorConfig(
            store_policy=config.store_policy,
            max_pending_bytes=config.store_pending,
            max_deferred_bytes=config.store_deferred,
        )
        connector = KvConnector(store, reader, self._metrics, self._speed, bounds)
        stack.callback(connector.close)
        if loaded.ranks is not None:
            stack.callback(loaded.ranks.close)
            if loaded.staging is None:
                loaded.ranks.map_cache(self._segment.fd)
        runner = loaded.make_runner(self._segment.view)
        if loaded.staging is not None:
            self._kv = loaded.staging.open(runner, loaded.ranks, self._segment.view)
            stack.callback(loaded.staging.close)
        else:
            assert isinstance(runner.cache, KvMemory)
            in_place = HostBlocks(runner.cache)
            self._kv = KvPorts(in_place, in_place)
        return EngineCore(runner, self._engine_config(), fetcher=connector, sink=connector), connector

    def _request_factory(self, core: EngineCore) -> RequestFactory:
        config, assets = self._config, self._loaded.assets
        grammars = None
        if config.engine == "torch":
            grammars = GrammarCompiler(assets.tokenizer_json, core.runner.vocab, assets.eos_ids)
        return RequestFactory(
            self._loaded.fingerprint, config.block_tokens, config.block_hash, assets.eos_ids, grammars
        )

    def _engine_config(self) -> EngineCoreConfig:
        config = self._config
        return EngineCoreConfig(
            block_tokens=config.block_tokens,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=min(config.max_num_seqs, config.max_num_batched_tokens),
            max_num_waiting=config.max_num_waiting,
            eviction=config.eviction,
            moves_preempted=config.preemption == "store",
            debug_checks=config.checks,
        )

    async def _peers_in(self, stack: contextlib.AsyncExitStack, service: FastService, core: EngineCore) -> None:
        """Offer the cache's segment to other workers."""
        clock = SystemClock()
        access = AccessTable(clock, _LEASE_MS, self._segment.size_bytes)
        self._peers = PeerServer(
            KvIdentity(self.instance_id, self._process.generation, self._loaded.fingerprint),
            self._loaded.layout,
            self._kv.window,
            access,
            clock,
            self._metrics,
            _HeldInEngine(self._thread),
        )
        server = SegmentServer(
            self._segment,
            access,
            generation=self._process.generation,
            host_id=host_id(),
            listen=replace(
                self._transport.listen,
                advertised_host=self._config.reachable_host,
                unix_path=str(self._process.run_dir / "kv.sock"),
                shm_hang_up_frees=True,
            ),
            limits=self._transport.limits,
            on_freed=self._peers.on_freed,
        )
        self._process.registry.register(ServerCollector(server))
        await server.start()
        stack.push_async_callback(server.close)
        self._peers.serve(service, server)
        self._peers.address, self._peers.unix_path = str(self.address), self.unix_path
        await stack.enter_async_context(beside(self._peers.sweep()))

    def _card(self, core: EngineCore) -> session_pb2.ModelCard:
        loaded = self._loaded
        return model_card(
            loaded.layout,
            loaded.assets,
            name=loaded.name,
            fingerprint=loaded.fingerprint,
            block_hash=self._config.block_hash,
            num_blocks=core.cache.num_blocks,
            context_length=core.scheduler.max_tokens,
            vocab_size=core.runner.vocab,
        )

    # --- from the engine's thread

    def _report_from_thread(self, report: StepReport) -> None:
        self._metrics.report(report)
        self._loop.call_soon_threadsafe(self._spread, report)

    def _spread(self, report: StepReport) -> None:
        self._hub.on_report(report)
        self._probe.on_report(report)
        self._beats.on_report(report)

    def _engine_failed(self, error: BaseException) -> None:
        """End the process at once: the engine's state is lost, and requests go on at other workers."""
        _log.error("worker.engine_failed", error=repr(error))
        os.kill(os.getpid(), signal.SIGKILL)

    def _end(self) -> common_pb2.EndReply:
        """Have the process end in order, as SIGTERM does."""
        self._process.stopping.set()
        return common_pb2.EndReply(num_requests=self._hub.num_requests, grace_s=self._config.grace_s)

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests; wait at most ``grace_s`` until those under way have ended and their KV was fetched."""
        self._hub.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._hub.idle.wait()
                await self._peers.idle.wait()


class _HeldInEngine:
    """The engine's cache as a `KvHolder`: exports are made and released between two steps of its thread."""

    def __init__(self, thread: EngineThread) -> None:
        self._thread = thread

    async def export_prefix(self, name: RequestId, hashes: Sequence[BlockHash]) -> KvExport | None:
        try:
            return await self._thread.call(lambda core: core.export_prefix(name, hashes))
        except asyncio.CancelledError:  # the reader hung up: what the engine may still hold for it is given back
            self.give_back(name)
            raise

    def give_back(self, name: RequestId) -> None:
        self._thread.post(lambda core: core.release_export(name))


class _Servicer(session_pb2_grpc.WorkerServicer):
    """The gRPC edge of a worker: sessions, the model card, and calls of administration."""

    def __init__(
        self,
        hub: SessionHub,
        thread: EngineThread,
        card: session_pb2.ModelCard,
        probe: EngineProbe,
        end: Callable[[], common_pb2.EndReply],
    ) -> None:
        self._hub = hub
        self._end = end
        self._probe = probe
        self._thread = thread
        self._card = card

    async def Describe(self, request: session_pb2.DescribeRequest, context: object) -> session_pb2.ModelCard:
        return self._card

    async def Session(
        self, request_iterator: AsyncIterator[session_pb2.ToWorker], context: object
    ) -> AsyncIterator[session_pb2.FromWorker]:
        async for message in self._hub.serve(request_iterator):
            yield message

    async def DropCache(
        self, request: session_pb2.DropCacheRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> session_pb2.DropCacheReply:
        return session_pb2.DropCacheReply(num_blocks=await self._thread.call(lambda core: core.drop_cached()))

    async def Drain(
        self, request: common_pb2.EndRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> common_pb2.EndReply:
        _log.info("worker.told_to_end")
        return self._end()

    async def Probe(
        self, request: session_pb2.ProbeRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> session_pb2.ProbeReply:
        """Send a request of one token through the engine and say how long it took."""
        try:
            return session_pb2.ProbeReply(seconds=await self._probe.run(min(request.deadline_s, _MAX_PROBE_S)))
        except TanghuluError as error:
            await grpc_edge.abort(context, error)
            raise


__all__: Sequence[str] = ("LoadedModel", "WorkerServer")
