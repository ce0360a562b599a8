"""Assembles a worker: model, cache in shared memory, engine thread, connector, peers, sessions, port.

The only module aware of all parts; each part uses only its neighbours' interfaces.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import Sequence
from dataclasses import replace

import structlog

from tanghulu.auth.certificate_roles import WORKER
from tanghulu.runtime.clock import SystemClock
from tanghulu.runtime.kv_events import publishing
from tanghulu.runtime.process import Process, host_id
from tanghulu.runtime.tasks import beside
from tanghulu.session.model_card import ModelCard
from tanghulu.session.speed import SpeedMeter
from tanghulu.store.client.block_store import BlockStore
from tanghulu.store.client.settings import ENGINE_ANSWER_S, Settings
from tanghulu.store.client.signed_kv import KvClient
from tanghulu.transfer_engine.core.access import AccessTable
from tanghulu.transfer_engine.core.segment import MemorySegment
from tanghulu.transfer_engine.engine import TransferEngine
from tanghulu.transfer_engine.metrics import EngineCollector, ServerCollector
from tanghulu.transfer_engine.options import transfer_settings
from tanghulu.transfer_engine.server import SegmentServer
from tanghulu.workers.engine.engine import EngineCore
from tanghulu.workers.engine.grammar import GrammarCompiler
from tanghulu.workers.engine.kv_layout import KvMemory
from tanghulu.workers.engine.ngram_drafts import NgramProposer
from tanghulu.workers.engine.scheduler import EngineCoreConfig
from tanghulu.workers.engine.thread import EngineThread, StepReport
from tanghulu.workers.kv.connector import ConnectorConfig, KvConnector
from tanghulu.workers.kv.peer_reader import PeerReader
from tanghulu.workers.kv.peer_server import KvIdentity, PeerServer
from tanghulu.workers.kv.ports import HostBlocks, KvPorts
from tanghulu.workers.kv.store_adapter import StoreAdapter
from tanghulu.workers.loading.loaded_model import LoadedModel
from tanghulu.workers.metrics import WorkerMetrics
from tanghulu.workers.sessions.health import EngineBeats, EngineProbe
from tanghulu.workers.sessions.kv_events import sender
from tanghulu.workers.sessions.port import SessionWorker, WorkerCalls
from tanghulu.workers.sessions.reports import EngineReports
from tanghulu.workers.sessions.server import SessionHub
from tanghulu.workers.sessions.wire import RequestFactory, model_card

_log = structlog.get_logger(__name__)
_WITHOUT_SECRET = (
    "anybody who may write to the store can put KV that this worker loads; --cluster-secret @FILE, the same for all "
    "conductors and workers, lets it load only what they have stored"
)
_LEASE_MS = 20_000
_LAST_STEP_S = 30.0  # most that the step under way may take when a worker ends


class WorkerServer(SessionWorker):
    """A running worker of our engine."""

    def __init__(self, process: Process, loaded: LoadedModel) -> None:
        super().__init__(process, loaded.config, loaded.name)
        self._config, self._loaded = loaded.config, loaded

    async def _start(self, stack: contextlib.AsyncExitStack) -> None:
        """Start the parts bottom up: memory, engine, its outside connections, and the port last."""
        port = await self._bind()
        core, connector = self._engine(stack)
        self._reports = EngineReports(self._spread)
        self._thread = EngineThread(core, self._reports.put, self._engine_failed, self._speed, self._reports.call)
        connector.attach(self._thread)
        await self._peers_in(stack)
        factory = self._request_factory(core)
        self._probe = EngineProbe(self._thread, factory.probe, SystemClock())
        peers = self._peers
        send = await stack.enter_async_context(publishing(self._config.event_endpoints))
        self._hub = SessionHub(
            self.instance_id,
            self._process.generation,
            factory,
            self._thread,
            peers.add_exports,
            peers.release,
            sender(send, factory.root()),
        )
        self._beats = EngineBeats(self._thread.beat, self._process.alive)
        self._thread.start()
        stack.push_async_callback(self._stop_engine)
        stack.callback(self._reports.close)
        await self._open(stack, port, WorkerCalls(self._card(core), self._drop_cached, self._probe.run, self._end))

    def _engine(self, stack: contextlib.AsyncExitStack) -> tuple[EngineCore, KvConnector]:
        config, loaded = self._config, self._loaded
        num_blocks = loaded.layout.num_blocks_in(config.kv_memory)
        size = num_blocks * loaded.layout.block_bytes if loaded.staging is None else loaded.staging.segment_bytes
        self._segment = MemorySegment.create(f"kv-{self.instance_id}", size)
        stack.callback(self._segment.close)
        self._metrics = WorkerMetrics(self._process.registry, loaded.layout, num_blocks)
        self._transport = transfer_settings(config, config.host)
        transfers = TransferEngine(
            transports=self._transport.transports,
            host_id=host_id(),
            clock=SystemClock(),
            config=replace(self._transport.engine, tls=config.credentials.tls.to(WORKER)),
        )
        stack.callback(transfers.close)
        self._process.registry.register(EngineCollector(transfers))
        store = None
        if config.store:
            if not self._secret:
                say = _log.info if config.tokens is None else _log.warning  # without tokens nobody is kept out anyway
                say("worker.no_cluster_secret", hint=_WITHOUT_SECRET)
            settings = Settings(master=config.master, master_answer_s=ENGINE_ANSWER_S)
            client = BlockStore(KvClient(settings, self._secret, self._metrics.store_refused.inc))
            store = StoreAdapter(client, loaded.fingerprint, loaded.layout.layer_bytes, loaded.layout.num_parts)
            stack.callback(store.close)
        self._speed = SpeedMeter(config.max_num_batched_tokens, config.peer_fetch)
        if loaded.ranks is not None:
            stack.callback(loaded.ranks.close)  # after the connector, whose copies may use memory of the ranks
            loaded.ranks.watch(self._engine_failed)
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
        credentials, sharing = config.credentials, self._kv.sharing
        reader = PeerReader(transfers, self.instance_id, loaded.fingerprint, credentials=credentials, sharing=sharing)
        stack.callback(reader.close)
        limits = ConnectorConfig(store_policy=config.store_policy)
        connector = KvConnector(store, reader, self._metrics, self._speed, loaded.layout, self._kv.port, limits)
        stack.callback(connector.close)
        return EngineCore(runner, self._engine_config(), connector), connector

    def _request_factory(self, core: EngineCore) -> RequestFactory:
        config, assets = self._config, self._loaded.assets
        grammars = None
        if config.engine == "torch":
            grammars = GrammarCompiler(assets.tokenizer_json, core.runner.vocab, assets.eos_ids)
        return RequestFactory(
            self._loaded.fingerprint,
            config.block_tokens,
            config.block_hash,
            assets.eos_ids,
            grammars,
            self._secret.naming_key,
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
            proposer=NgramProposer.of(config.speculative),
            debug_checks=config.checks,
        )

    async def _peers_in(self, stack: contextlib.AsyncExitStack) -> None:
        """Offer the cache's segment to other workers."""
        clock = SystemClock()
        access = AccessTable(clock, _LEASE_MS, self._segment.size_bytes)
        self._peers = PeerServer(
            KvIdentity(
                self.instance_id,
                self._process.generation,
                self._loaded.fingerprint,
                str(self.address),
                self.unix_path,
            ),
            self._loaded.layout,
            self._kv.window,
            access,
            clock,
            self._metrics,
            self._thread,
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
                tls=None if self._tls is None else self._tls.context,
            ),
            limits=self._transport.limits,
            on_freed=self._peers.on_freed,
        )
        self._process.registry.register(ServerCollector(server))
        await server.start()
        stack.push_async_callback(self._peers.close)
        stack.push_async_callback(server.close)
        self._peers.serve(self._service, server)
        await stack.enter_async_context(beside(self._peers.sweep()))

    def _card(self, core: EngineCore) -> ModelCard:
        loaded = self._loaded
        return model_card(
            loaded.layout,
            loaded.assets,
            model=loaded.name,
            fingerprint=loaded.fingerprint,
            block_hash=self._config.block_hash,
            context_length=core.scheduler.max_tokens,
            vocab_size=core.runner.vocab,
            secret_check=self._secret.check_value,
        )

    # --- from the engine

    def _spread(self, reports: Sequence[StepReport]) -> None:
        self._metrics.report(reports)
        self._hub.on_reports(reports)
        for report in reports:
            self._probe.on_report(report)
        self._beats.on_report(reports[-1])

    def _engine_failed(self, error: BaseException) -> None:
        """End the process at once: the engine's or a rank's state is lost; requests continue at other workers."""
        _log.error("worker.engine_failed", error=repr(error))
        os.kill(os.getpid(), signal.SIGKILL)

    async def _stop_engine(self) -> None:
        """End the engine's thread; or at once the process, if that thread is stuck in a call that does not return.

        The thread may use everything closed after it: the model's memory, the cache, the transfers.
        """
        if await asyncio.to_thread(self._thread.stop, _LAST_STEP_S):
            return
        _log.error("worker.engine_hung", waited_s=_LAST_STEP_S)
        shutil.rmtree(self._process.run_dir, ignore_errors=True)
        os._exit(1)

    async def _drop_cached(self) -> int:
        return await self._thread.call(lambda core: core.pool.drop_cached())

    async def _ended(self) -> None:
        await super()._ended()
        await self._peers.idle.wait()  # the KV of ended prefills was fetched


__all__: Sequence[str] = ("LoadedModel", "WorkerServer")
