"""Assembles a vLLM worker: vLLM's engine, the follower of its KV events, sessions, port.

The only place with access to all parts, like ``workers.assembly`` for our own engine.
Hand-overs go through the store (`StoredPrompts`): they wait until the blocks of a prompt are stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Coroutine, Sequence
from typing import Any

import structlog

from tanghulu.conductor.engines.events import VllmFollower
from tanghulu.engines.common.names import block_keys
from tanghulu.engines.vllm_worker.config import VllmWorkerConfig
from tanghulu.engines.vllm_worker.engine import LoadBook, VllmEngine
from tanghulu.engines.vllm_worker.llm import LoadedVllm, StatsRelay, VllmFacts
from tanghulu.engines.vllm_worker.requests import VllmRequestFactory
from tanghulu.errors import NodeUnavailable, TanghuluError
from tanghulu.hashing import VLLM_SHA256_CBOR
from tanghulu.masters import Masters
from tanghulu.model_files.assets import TokenizerAssets, assets_of_folder
from tanghulu.rpc.greeting import welcome
from tanghulu.rpc.methods import HELLO
from tanghulu.runtime.kv_endpoints import EventEndpoints
from tanghulu.runtime.process import Process
from tanghulu.runtime.tasks import beside
from tanghulu.session.model_card import ModelCard
from tanghulu.session.outputs import KvSource
from tanghulu.store.client.aio import AsyncClient
from tanghulu.store.client.settings import ENGINE_ANSWER_S, Settings
from tanghulu.types import BlockHash, Fingerprint, RequestId
from tanghulu.workers.engine.exports import KvExport
from tanghulu.workers.engine.thread import StepReport
from tanghulu.workers.metrics import WorkerMetrics
from tanghulu.workers.sessions.health import EngineBeats
from tanghulu.workers.sessions.port import SessionWorker, WorkerCalls
from tanghulu.workers.sessions.server import SessionHub
from tanghulu.workers.sessions.wire import model_card

_log = structlog.get_logger(__name__)
#: Maximum number of requests, running and waiting.
MAX_REQUESTS = 1024
#: Interval of attempts to end a starting vLLM.
BREAK_OFF_S = 0.5


class VllmWorkerServer(SessionWorker):
    """A running worker of vLLM. ``failure`` is the reason if vLLM has ended."""

    def __init__(self, process: Process, config: VllmWorkerConfig) -> None:
        super().__init__(process, config, config.folder.name)
        self._config = config
        self._ending = asyncio.Event()
        self.failure: BaseException | None = None

    async def _start(self, stack: contextlib.AsyncExitStack) -> None:
        """Start vLLM first, which starts processes, then open the port."""
        process, config, relay = self._process, self._config, StatsRelay()
        private = [f"ipc://{process.run_dir / name}" for name in ("kv-events.sock", "kv-replay.sock")]
        public = config.event_endpoints
        events = (
            EventEndpoints(*private) if public is None else EventEndpoints(public.events, public.replay or private[1])
        )
        process.progress("starting vLLM", 0.0)
        loaded = await self._loaded(asyncio.to_thread(LoadedVllm, config.engine_arguments(events), relay))
        stack.push_async_callback(asyncio.to_thread, loaded.close)
        facts = await loaded.facts("")
        assets = assets_of_folder(config.folder, facts.bos_id, facts.eos_ids)
        surface, more = loaded.surface(), {}
        if config.store:
            stored = StoredPrompts(config.master, facts.fingerprint, facts.num_ranks)
            stack.push_async_callback(stored.close)
            more["stored"] = stored.wait
        self._engine = VllmEngine(
            surface,
            LoadBook(facts.num_blocks, facts.max_num_seqs),
            facts.block_tokens,
            self._report,
            self._failed,
            MAX_REQUESTS,
            **more,
        )
        stack.push_async_callback(self._engine.close)
        relay.listen = self._engine.on_stats
        follower = VllmFollower(self.instance_id, events.local, self._engine.on_change)
        await stack.enter_async_context(beside(follower.run()))
        await self._serve(stack, loaded, facts, assets)
        _log.info("vllm.loaded", model=self.model_name, fingerprint=facts.fingerprint.hex(), blocks=facts.num_blocks)

    async def _loaded(self, loads: Coroutine[Any, Any, LoadedVllm]) -> LoadedVllm:
        """Wait for vLLM, which takes a minute; if stopped meanwhile, cancel it and raise NodeUnavailable."""
        loading, stopping = asyncio.create_task(loads), asyncio.create_task(self._process.stopping.wait())
        await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        while not loading.done():
            LoadedVllm.break_off()
            await asyncio.wait((loading,), timeout=BREAK_OFF_S)
        if self._process.stopping.is_set() and loading.exception() is not None:
            raise NodeUnavailable("stopped before vLLM had started") from loading.exception()
        return loading.result()

    async def _serve(
        self, stack: contextlib.AsyncExitStack, loaded: LoadedVllm, facts: VllmFacts, assets: TokenizerAssets
    ) -> None:
        process, config = self._process, self._config
        port = await self._bind()
        factory = VllmRequestFactory(
            facts.block_tokens,
            by_priority=loaded.by_priority,
            keeps_seeds=not loaded.on_cpu,
            has_store=config.store,
            naming_key=self._secret.naming_key,
        )
        self._metrics = WorkerMetrics(process.registry, facts, facts.num_blocks)
        self._hub = SessionHub(
            self.instance_id, process.generation, factory, self._engine, self._handed, lambda export: None
        )
        self._beats = EngineBeats(self._engine.beat, process.alive)
        self._service.register(HELLO, welcome)
        await stack.enter_async_context(beside(self._engine.watch()))
        probe = functools.partial(self._engine.probe, factory.probe(RequestId("probe")))
        await self._open(
            stack, port, WorkerCalls(self._card(facts, assets), self._engine.drop_cached, probe, self._end)
        )

    def _card(self, facts: VllmFacts, assets: TokenizerAssets) -> ModelCard:
        return model_card(
            facts,
            assets,
            model=self.model_name,
            fingerprint=facts.fingerprint,
            block_hash=VLLM_SHA256_CBOR,
            context_length=facts.context_length,
            vocab_size=facts.vocab_size,
            secret_check=self._secret.check_value,
        )

    def _handed(self, exports: Sequence[KvExport]) -> dict[RequestId, KvSource]:
        """Return the sources of handed-over prompts, all of whose KV is in the store."""
        address = str(self.address)
        return {export.request_id: KvSource(self.instance_id, address, "", 0, export.num_tokens) for export in exports}

    def _report(self, report: StepReport) -> None:
        self._metrics.report([report])
        self._hub.on_reports([report])
        self._beats.on_report(report)

    def _failed(self, error: BaseException) -> None:
        _log.error("worker.engine_failed", error=repr(error))
        self.failure = error
        self._ending.set()

    async def until(self, stopping: asyncio.Event) -> None:
        """Wait until ``stopping`` is set or vLLM has ended."""
        waits = [asyncio.create_task(stopping.wait()), asyncio.create_task(self._ending.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()


#: Saves that take longer, or were left out because too many were in progress, are not waited for: the decoding worker
#: computes what it does not find.
STORED_S = 2.0


class StoredPrompts:
    """The store's part in the hand-over of prompts; each of ``num_ranks`` of vLLM saves a part of each block."""

    def __init__(self, master: Masters, fingerprint: Fingerprint, num_ranks: int) -> None:
        self._client = AsyncClient(Settings(master=master, master_answer_s=ENGINE_ANSWER_S))
        self._fingerprint, self._num_ranks = fingerprint, num_ranks

    async def wait(self, hashes: Sequence[BlockHash]) -> bool:
        """Wait at most STORED_S until all blocks are in the store; returns whether they are."""
        keys = [key for part in range(self._num_ranks) for key in block_keys(self._fingerprint, hashes, part)]
        try:
            are_there = await self._client.wait_for_many(keys, deadline_s=STORED_S) if keys else []
        except TanghuluError as error:
            _log.warning("vllm.prompt_not_stored", blocks=len(hashes), code=error.code, error=error.message)
            return False
        if not all(are_there):
            _log.warning("vllm.prompt_not_stored", blocks=len(hashes), keys=len(keys), there=sum(are_there))
        return all(are_there)

    async def close(self) -> None:
        """Close the client."""
        await self._client.close()
