"""The global router's configuration, start and orderly shutdown; ``routing_service.main`` has the command."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import structlog
from prometheus_client import CollectorRegistry

from tanghulu.auth.certificate_roles import CONDUCTOR, ROUTER
from tanghulu.auth.credentials import TlsFiles
from tanghulu.conductor import route_rights
from tanghulu.conductor.inference.service import DEFAULT_BODY_BYTES
from tanghulu.conductor.pool_router.app import RequestIds, make_app
from tanghulu.conductor.pool_router.forward import Forwarder, PoolMetrics
from tanghulu.conductor.pool_router.grid import PoolMap, read_pools
from tanghulu.conductor.pool_router.relaying import SILENCE_S, RelayClient
from tanghulu.discovery.base import Discovery, EventKind, InstanceEvent
from tanghulu.discovery.entering import enter, instance_of, meet
from tanghulu.discovery.open import HELP as DISCOVERY_HELP
from tanghulu.discovery.open import open_discovery
from tanghulu.errors import ConfigError
from tanghulu.runtime.clock import SystemClock
from tanghulu.runtime.config import check_bounds, option
from tanghulu.runtime.master_options import HttpOptions, MasterOptions
from tanghulu.runtime.process import Process, ProcessConfig
from tanghulu.runtime.tasks import beside
from tanghulu.types import Address, Role
from tanghulu.web.server import Server

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class GlobalRouterConfig(MasterOptions, HttpOptions, ProcessConfig):
    """Options of the global router."""

    port: int = option(8100, "port of the HTTP API; 0 picks one")
    pools: Path | None = option(None, "TOML or JSON file with the pools and the grid")
    discovery: str = option("master", DISCOVERY_HELP + ", or none: only the urls in the file")
    max_body_size: int = option(DEFAULT_BODY_BYTES, "largest request body", size=True, least=1)
    silence_timeout_s: float = option(
        SILENCE_S, "seconds of silence after which a server with a request counts as lost", least=0.1
    )
    grace_s: float = option(10.0, "seconds for which running requests may continue at shutdown", least=0)

    def __post_init__(self) -> None:
        check_bounds(self)

    def read_pools(self) -> PoolMap:
        """Read the pools. Raises ConfigError for a missing or invalid file."""
        if self.pools is None:
            raise ConfigError("--pools FILE is required: it lists the pools")
        return read_pools(self.pools)


def refuse_plain(tls: TlsFiles, *urls: str) -> None:
    """Raise ConfigError for a plain HTTP URL if TLS files are configured."""
    for url in urls:
        if tls and not url.startswith("https:"):
            raise ConfigError(f"{url} is plain HTTP; with --tls-cert or --tls-ca name the https:// URL of a server")


class GlobalRouter:
    """The global router without its process."""

    def __init__(self, config: GlobalRouterConfig, pools: PoolMap, registry: CollectorRegistry) -> None:
        self.config = config
        for pool in pools.pools.values():
            refuse_plain(config.tls, *pool.urls)
        self._server = Server(config, config.host)
        client = RelayClient(config.silence_timeout_s, config.tls.to(CONDUCTOR, ROUTER))
        self.forwarder = Forwarder(pools, SystemClock(), PoolMetrics(registry), client)
        self.address = Address("", 0)
        self._registry = registry

    @contextlib.asynccontextmanager
    async def running(self, discovery: Discovery | None) -> AsyncIterator[GlobalRouter]:
        """Serve inside the block; at its end, requests in progress may finish within the grace period."""
        config = self.config
        routes = make_app(self.forwarder, self._registry, config.max_body_size)
        app = RequestIds(self._server.authorized(routes, route_rights.POOL_ROUTER))
        pools = self.forwarder.pools.pools if discovery is not None else ()
        following = [self._follow(discovery, name) for name in pools if discovery is not None]
        async with (
            contextlib.aclosing(self.forwarder),
            self._server.serving(app, config.port, config.grace_s) as server,
            beside(*following),
        ):
            self.address = Address(config.reachable_host, server.address.port)
            yield self

    def apply(self, pool: str, event: InstanceEvent) -> None:
        """Apply an event of Discovery about the conductors of ``pool``."""
        instance, members = event.instance, self.forwarder.members[pool]
        if instance is not None and event.kind is EventKind.PUT:
            is_tls = bool(self.config.tls) or instance.attributes.get("scheme") == "https"
            scheme = "https" if is_tls else "http"  # callers' keys are never sent in clear text where TLS is configured
            members.add(instance.id, f"{scheme}://{instance.address}")
        elif instance is not None and event.kind is EventKind.DELETE:
            members.remove(instance.id)

    async def _follow(self, discovery: Discovery, pool: str) -> None:
        async for event in discovery.watch(Role.CONDUCTOR, namespace=pool):
            self.apply(pool, event)


async def serve(process: Process, config: GlobalRouterConfig) -> None:
    """Run until the process is asked to stop."""
    router = GlobalRouter(config, config.read_pools(), process.registry)
    async with contextlib.AsyncExitStack() as stack:
        discovery = None
        if config.discovery != "none":
            discovery = await stack.enter_async_context(open_discovery(config.discovery, config.master))
            await process.unless_stopping(meet(discovery))
        await stack.enter_async_context(router.running(discovery))
        instance = instance_of(process, router.address)
        if discovery is not None:
            registration = await process.unless_stopping(enter(discovery, instance))
            stack.push_async_callback(registration.close)
        process.ready(instance.id, router.address)
        await process.stopping.wait()
