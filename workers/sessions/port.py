"""The port of a worker of any engine: sessions of conductors, and the calls beside them."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import structlog

from tanghulu.auth.tokens import TokensFile
from tanghulu.discovery.base import Discovery
from tanghulu.discovery.entering import enter, instance_of
from tanghulu.discovery.open import HELP as DISCOVERY_HELP
from tanghulu.rpc.authorizer import Authorizer
from tanghulu.rpc.fast_port import FastPort
from tanghulu.rpc.fast_server import FastService, Peer
from tanghulu.rpc.methods import END, EndReply, EndRequest
from tanghulu.runtime.config import option
from tanghulu.runtime.kv_events import KvEventOptions
from tanghulu.runtime.master_options import MasterOptions, PortOptions, SecretOptions
from tanghulu.runtime.process import Process, ProcessConfig
from tanghulu.runtime.tasks import beside
from tanghulu.session.messages import (
    DESCRIBE,
    DROP_CACHE,
    PROBE,
    DescribeRequest,
    DropCacheReply,
    DropCacheRequest,
    ProbeReply,
    ProbeRequest,
)
from tanghulu.session.model_card import ModelCard
from tanghulu.types import Address
from tanghulu.workers.sessions.health import EngineBeats
from tanghulu.workers.sessions.server import SessionHub

_log = structlog.get_logger(__name__)
_MAX_PROBE_S = 300.0


class WorkerCalls:
    """Answers the calls.

    ``drop_cached`` returns the number of forgotten blocks, ``probe`` takes a deadline and returns the seconds to a
    token; both raise typed errors; ``end`` ends the process in order.
    """

    def __init__(
        self,
        card: ModelCard,
        drop_cached: Callable[[], Awaitable[int]],
        probe: Callable[[float], Awaitable[float]],
        end: Callable[[], EndReply],
    ) -> None:
        self._card = card
        self._drop_cached = drop_cached
        self._probe = probe
        self._end = end

    def serve(self, service: FastService) -> None:
        """Answer the calls arriving at ``service``."""
        service.register(DESCRIBE, self._describe)
        service.register(DROP_CACHE, self._drop)
        service.register(PROBE, self._probe_engine)
        service.register(END, self._end_process)

    def _describe(self, peer: Peer, request: DescribeRequest, _: memoryview) -> ModelCard:
        return self._card

    async def _drop(self, peer: Peer, request: DropCacheRequest, _: memoryview) -> DropCacheReply:
        return DropCacheReply(await self._drop_cached())

    async def _probe_engine(self, peer: Peer, request: ProbeRequest, _: memoryview) -> ProbeReply:
        return ProbeReply(await self._probe(min(request.deadline_s, _MAX_PROBE_S)))

    def _end_process(self, peer: Peer, request: EndRequest, _: memoryview) -> EndReply:
        _log.info("worker.end_requested")
        return self._end()


@dataclass(frozen=True, kw_only=True)
class SessionOptions(SecretOptions, KvEventOptions, MasterOptions, PortOptions, ProcessConfig):
    """The options of every worker, whatever its engine."""

    port: int = option(7430, "port of sessions, peers and administration; 0 picks one")
    discovery: str = option("master", DISCOVERY_HELP)
    store: bool = option(True, "load prefixes from the store and keep new blocks there")
    grace_s: float = option(
        10.0, "seconds for which running requests may continue at shutdown before they move to other workers", least=0
    )

    def __post_init__(self) -> None:
        PortOptions.__post_init__(self)
        KvEventOptions.__post_init__(self)


class SessionWorker(ABC):
    """A worker with its port, an async context manager; its engine is the subclass's."""

    def __init__(self, process: Process, config: SessionOptions, model_name: str) -> None:
        self._process = process
        self._options = config
        self._secret = config.shared_secret()
        self._service = FastService(max_connections=config.max_connections)
        self._stack = contextlib.AsyncExitStack()
        self._hub: SessionHub[Any]
        self._beats: EngineBeats
        self.model_name = model_name
        self.address = Address("", 0)
        self.unix_path = ""
        self.instance_id = process.instance_id(config.port)

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            await self._start(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    @abstractmethod
    async def _start(self, stack: contextlib.AsyncExitStack) -> None:
        """Start all parts, which ``stack`` closes in reverse: bind the port, set hub and beats, open the port last."""

    async def _bind(self) -> FastPort:
        """Bind the port, whose address names the worker; nothing is served before `_open`."""
        config, process = self._options, self._process
        self._tls = config.server_tls()
        self._tokens = None if config.tokens is None else TokensFile(config.tokens)
        port = FastPort(self._service, process.run_dir, "worker", self._tls)
        self.address = await port.bind(config.host, config.port, config.reachable_host)
        self.unix_path = port.unix_path
        self.instance_id = process.instance_id(self.address.port)
        if self._tokens is not None:
            at = Address(config.host, self.address.port)
            self._tokens.answer_at(self.address, at, unix_path=port.unix_path)
        return port

    async def _open(self, stack: contextlib.AsyncExitStack, port: FastPort, calls: WorkerCalls) -> None:
        """Serve sessions and ``calls`` to those who may, and keep the engine's heart beating."""
        self._hub.serve(self._service)
        calls.serve(self._service)
        if self._tokens is not None:
            authorizer = Authorizer(self._tokens)
            authorizer.authorize(self._service)
            await stack.enter_async_context(beside(authorizer.watch(self._service)))
        await stack.enter_async_context(beside(self._beats.run()))
        await port.open()
        stack.push_async_callback(port.close)
        stack.callback(self._hub.close)

    @contextlib.asynccontextmanager
    async def registered(
        self, discovery: Discovery, attributes: Mapping[str, str]
    ) -> AsyncIterator[contextlib.AsyncExitStack]:
        """Register the worker; closing the value ends the registration alone."""
        process = self._process
        attributes = {"model": self.model_name, **attributes}
        instance = instance_of(process, self.address, unix_path=self.unix_path, attributes=attributes)
        registration = await process.unless_stopping(enter(discovery, instance))
        async with contextlib.AsyncExitStack() as registered:
            registered.push_async_callback(registration.close)
            process.ready(self.instance_id, self.address)
            yield registered

    async def drain(self) -> None:
        """Refuse new requests; wait at most ``grace_s`` until those under way have ended."""
        self._hub.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._options.grace_s):
                await self._ended()

    async def _ended(self) -> None:
        """Return when no work is under way."""
        await self._hub.idle.wait()

    def _end(self) -> EndReply:
        """End the process in order, as SIGTERM does."""
        self._process.stopping.set()
        return EndReply(num_requests=self._hub.num_requests, grace_s=self._options.grace_s)
