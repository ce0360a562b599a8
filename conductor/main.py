"""``tanghulu conductor``: configuration, start and orderly shutdown of the process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from prometheus_client import CollectorRegistry

from tanghulu.auth.tokens import TokensFile
from tanghulu.conductor import dashboard, route_rights
from tanghulu.conductor.curves import live as curves
from tanghulu.conductor.dispatch.admission import Admission
from tanghulu.conductor.dispatch.dispatcher import Dispatcher
from tanghulu.conductor.dispatch.entry import Limits
from tanghulu.conductor.dispatch.lifecycle import MoveLimits
from tanghulu.conductor.dispatch.queue import ORDERS, QueueOrder
from tanghulu.conductor.engines.servers import FILE_HELP as ENGINES_HELP
from tanghulu.conductor.engines.servers import HELP as ENGINE_HELP
from tanghulu.conductor.engines.source import Engines
from tanghulu.conductor.explain.explainer import Explainer
from tanghulu.conductor.grpc_api.servicer import InferencePort
from tanghulu.conductor.http.app import make_app
from tanghulu.conductor.http.envelope import Envelope
from tanghulu.conductor.inference.service import DEFAULT_BODY_BYTES, ROOM_BYTES, Service, UnknownFields
from tanghulu.conductor.metrics import ConductorMetrics
from tanghulu.conductor.peers import group
from tanghulu.conductor.replicating import Replicator, request_copies
from tanghulu.conductor.routing.overrides import RoutingPolicies, parse_weights
from tanghulu.conductor.routing.policies.registry import POLICY_NAMES
from tanghulu.conductor.routing.profiles import read_profiles
from tanghulu.conductor.routing.requests import Timeouts
from tanghulu.conductor.stories.otel import SpanExport
from tanghulu.conductor.stories.recorder import Recorder
from tanghulu.conductor.tools.choosing import AUTO, REASONING_PARSERS, TOOL_CALL_PARSERS, ParserNames
from tanghulu.discovery.base import Discovery
from tanghulu.discovery.entering import enter, instance_of, meet
from tanghulu.discovery.open import HELP as DISCOVERY_HELP
from tanghulu.discovery.open import NONE as NO_DISCOVERY
from tanghulu.discovery.open import open_discovery
from tanghulu.errors import ConfigError, NodeUnavailable
from tanghulu.eviction import POLICIES
from tanghulu.masters import Masters
from tanghulu.rpc.methods import EndReply
from tanghulu.runtime.clock import SystemClock
from tanghulu.runtime.config import check_bounds, command, option
from tanghulu.runtime.master_options import HttpOptions, MasterOptions, SecretOptions
from tanghulu.runtime.process import Process, ProcessConfig, run
from tanghulu.runtime.tasks import beside
from tanghulu.types import Address, Role
from tanghulu.web.access import listed
from tanghulu.web.bodies import Bodies
from tanghulu.web.server import HttpServer, Server

_log = structlog.get_logger(__name__)
_OBSERVE_S = 1.0
#: Time for the last clients that connected before listening ended to send their requests.
_LINGER_S = 0.5


_WITHOUT_SECRET = (
    "tenants can compute the names of each other's blocks, and with workers' --block-hash xxh3_128 find prompts that "
    "share them: give conductors and workers the same --cluster-secret, or workers --block-hash sha256"
)


@dataclass(frozen=True, kw_only=True)
class ConductorConfig(SecretOptions, MasterOptions, HttpOptions, ProcessConfig):
    """Options of the conductor."""

    port: int = option(8000, "port of the HTTP API; 0 picks one")
    discovery: str = option(
        "",
        DISCOVERY_HELP + "; none is a conductor with --engine servers alone",
        shown="master, or none with --engine and without --master",
    )
    engine: tuple[str, ...] = option((), ENGINE_HELP, metavar="ENGINE=URL[,OPTION=VALUE...]")
    engines: Path | None = option(None, ENGINES_HELP)
    policy: str = option("ttft-min", "routing policy", choices=POLICY_NAMES)
    policy_weights: str = option("", "weights of the policies, such as alpha=0.7,temperature=0.2")
    profiles: Path | None = option(
        None, "file (JSON or TOML) with costs of prefill and decode, used until workers report measured ones"
    )
    max_in_flight: int = option(1024, "limit on sequences running at workers", least=1)
    max_queued: int = option(1024, "limit on waiting sequences; further requests are rejected with 429", least=1)
    queue_timeout_s: float = option(30.0, "longest wait for a place or a worker, in seconds", least=0)
    queue_order: str = option(
        "fcfs", "order of waiting requests: first come first served, or shortest prefill with ageing", choices=ORDERS
    )
    hot_prefix_rate: float = option(
        10.0,
        "fetches per second and store node above which a prefix is copied to more nodes; 0 disables it",
        least=0,
    )
    ttft_slo_s: float = option(
        0.0, "reject requests with 429 whose first token would take longer, in seconds; 0 disables it", least=0
    )
    tbt_slo_s: float = option(
        0.0, "reject requests with 429 whose tokens would take longer, in seconds; 0 disables it", least=0
    )
    request_timeout_s: float = option(0.0, "timeout of a whole request, in seconds; 0 disables it", least=0)
    first_token_timeout_s: float = option(
        120.0, "timeout of a request's first token, in seconds; 0 disables it", least=0
    )
    token_timeout_s: float = option(60.0, "timeout of each further token, in seconds; 0 disables it", least=0)
    worker_timeout_s: float = option(
        10.0,
        "seconds without a step after which a worker counts as lost until a probe succeeds; 0 disables it",
        least=0,
    )
    max_redispatches: int = option(
        3, "limit on moves of a request from lost workers without a new token in between", least=0
    )
    migration_max_seq_len: int = option(
        0, "longest sequence that moves when its worker is lost, in tokens; 0 moves all", least=0
    )
    tool_call_parser: str = option(
        AUTO,
        "format of the models' tool calls; auto detects it from the chat template",
        choices=TOOL_CALL_PARSERS,
    )
    reasoning_parser: str = option(
        AUTO,
        "format of the models' reasoning; auto detects it from the chat template",
        choices=REASONING_PARSERS,
    )
    max_body_size: int = option(DEFAULT_BODY_BYTES, "largest request body", size=True, least=1)
    unknown_fields: str = option(
        UnknownFields.WARN.value,
        "treatment of unknown fields: a Warning header, or rejection with 400",
        choices=tuple(each.value for each in UnknownFields),
    )
    cors_origins: str = option(
        "", "origins of web pages that may read the answers: https://a.example,https://b.example, or *"
    )
    log_requests: bool = option(False, "log each finished request with the time of its phases")
    record: Path | None = option(
        None, "directory for traces of all requests, for tanghulu replay: times, lengths and shared prefixes, no text"
    )
    explain_memory: int = option(
        64 << 20, "memory for recent prompts, by which cache misses are explained; 0 disables that", size=True, least=0
    )
    explain_text: bool = option(
        False, "quote prompts where explanations of cache misses name the characters that differ"
    )
    curve_memory: int = option(
        32 << 20, "memory for hit-rate curves (tanghulu curve); 0 disables them", size=True, least=0
    )
    curve_eviction: str = option(
        "",
        "eviction policy for which the curves are drawn",
        choices=("", *POLICIES),
        shown="that of the store's nodes, or lru without any",
    )
    otlp_endpoint: str = option("", "OpenTelemetry collector for request spans, such as http://host:4318 (extra otel)")
    grpc_port: int = option(-1, "port of inference over gRPC; 0 picks one, -1 disables it", least=-1)
    peer_port: int = option(0, "port on which other conductors follow this one's requests; 0 picks one")
    notice_s: float = option(
        2.0, "seconds for which requests are still accepted at shutdown, after /ready fails", least=0
    )
    grace_s: float = option(10.0, "seconds for which running requests may then continue", least=0)
    reuse_port: bool = option(False, "share the port with a successor that has the option, too (SO_REUSEPORT)")
    snapshot_every_s: float = option(
        0.0, "seconds between snapshots of each worker's cache; 0 disables them", debug=True
    )

    def __post_init__(self) -> None:
        check_bounds(self)
        parse_weights(self.policy_weights)
        if 0 < self.curve_memory < curves.MODEL_BYTES:
            raise ConfigError(f"--curve-memory is {self.curve_memory}; it must be 0 or at least {curves.MODEL_BYTES}")

    @property
    def cluster(self) -> str:
        """The Discovery to use; a conductor of engine servers alone needs none."""
        is_alone = (self.engine or self.engines) and self.master == type(self).master
        return self.discovery or (NO_DISCOVERY if is_alone else "master")


class Conductor:
    """The conductor without its process: an HTTP address in front of a Discovery's workers.

    ``stopping`` is set when an administrator requests shutdown.
    """

    def __init__(
        self,
        config: ConductorConfig,
        conductor_id: str,
        registry: CollectorRegistry,
        stopping: asyncio.Event | None = None,
    ) -> None:
        limits = Limits(
            config.max_in_flight,
            config.max_queued,
            config.queue_timeout_s,
            MoveLimits(config.max_redispatches, config.migration_max_seq_len),
            Admission(config.ttft_slo_s, config.tbt_slo_s),
            QueueOrder(config.queue_order),
            read_profiles(config.profiles),
            config.hot_prefix_rate,
            Timeouts(config.request_timeout_s, config.first_token_timeout_s, config.token_timeout_s),
            config.worker_timeout_s,
        )
        self.config = config
        self.engines = Engines(
            config.engine, config.engines, config.namespace, config.place, config.shared_secret(), config.tls
        )
        self.metrics = ConductorMetrics(registry)
        self.dispatcher = Dispatcher(
            conductor_id,
            RoutingPolicies(config.policy, parse_weights(config.policy_weights, conductor_id)),
            self.metrics,
            limits,
            SystemClock(),
            config.place,
            config.credentials,
            secret=config.shared_secret(),
            open_engine=self.engines.open,
        )
        self._spans = SpanExport(config.otlp_endpoint, conductor_id) if config.otlp_endpoint else None
        if self._spans is not None:
            self.dispatcher.stories.listeners.append(self._spans.export)
        self._recorder = Recorder(config.record, self.metrics.recorded_requests) if config.record else None
        if self._recorder is not None:
            self.dispatcher.when_ended.append(self._recorder.add)
        metrics, memory = self.metrics, config.curve_memory
        self.curves = curves.LiveCurves(
            self.dispatcher.registry, metrics.curve, metrics.curve_requests, memory, config.curve_eviction
        )
        if self.curves.enabled:
            self.dispatcher.when_ended.append(self.curves.add)
        self.explainer = Explainer(self.dispatcher, config.explain_memory, self.metrics, shows_text=config.explain_text)
        if config.log_requests:
            self.dispatcher.stories.listeners.append(lambda story: _log.info("request.story", **story.summary()))
        bodies = Bodies(config.max_body_size, ROOM_BYTES)
        unknown_fields = UnknownFields(config.unknown_fields)
        parsers = ParserNames(config.tool_call_parser, config.reasoning_parser)
        self.service = Service(self.dispatcher, registry, bodies, config.queue_timeout_s, unknown_fields, parsers)
        self._server = Server(config, config.host, listed(config.cors_origins))
        tokens = None if config.tokens is None else TokensFile(config.tokens)
        self.peers = group.PeerGroup(
            self.dispatcher.own,
            self.dispatcher.peers,
            config.credentials,
            self._end_in_order,
            self.service.abort_here,
            tokens,
        )
        self.service.abort_at_peers = self.peers.abort
        keys = self._server.keys
        if (
            keys is not None
            and not config.shared_secret()
            and len({each.tenant for each in keys.table.keys.values()}) > 1
        ):
            _log.warning("conductor.tenants_without_secret", hint=_WITHOUT_SECRET)
        self.inference = InferencePort(self.service, self.metrics, config, self._server.keys)
        self.dashboard = dashboard.Dashboard(
            self.dispatcher,
            self.metrics,
            Masters.of(config.master).showing(config.credentials),
            self.explainer,
            self.curves,
        )
        self.address = Address("", 0)
        self._stopping = stopping or asyncio.Event()

    @contextlib.asynccontextmanager
    async def running(self, discovery: Discovery, listen_port: int, run_dir: Path) -> AsyncIterator[Conductor]:
        """Serve inside the block; at its end, finish work in progress within the grace period.

        Raises ConfigError if the port is taken.
        """
        config = self.config
        routes = make_app(self.service)
        for added in (dashboard.router(self.dashboard), curves.router(self.curves)):
            routes.app.include_router(added, include_in_schema=False)
        authorized = self._server.authorized(routes, route_rights.CONDUCTOR, self.service.accounts)
        app = Envelope(authorized, self.service.metrics, listed(config.cors_origins))
        async with (
            self._server.serving(app, listen_port, config.grace_s, reuse_port=config.reuse_port) as server,
            self._ended_in_order(server),
        ):
            self.address = Address(config.reachable_host, server.address.port)
            if config.grpc_port >= 0:
                await self.inference.start(Address(config.host, config.grpc_port), reuse_port=config.reuse_port)
            await self.peers.start(config.host, config.peer_port, config.reachable_host, run_dir)
            async with beside(
                self.dispatcher.registry.follow(discovery, config.namespace),
                self.engines.source.follow(self.dispatcher.registry.apply),
                self.dispatcher.registry.watch_engines(),
                self.peers.follow(discovery, config.namespace),
                self._observe(),
                self.dispatcher.mirror.apply_events(),
                self._request_snapshots(),
                self.curves.run(None if config.cluster == NO_DISCOVERY else self.dashboard.store_state),
            ):
                yield self
                await self._finish(server)

    @contextlib.asynccontextmanager
    async def _ended_in_order(self, server: HttpServer) -> AsyncIterator[None]:
        """After the block, stop ``server`` and then everything its requests need."""
        try:
            yield
        finally:
            server.force_exit = True
            server.stop()
            await self.dispatcher.registry.close()
            self.dispatcher.fail_all(NodeUnavailable("the conductor is shutting down; retry at another one"))
            await self.inference.stop(_LINGER_S)
            await self.peers.close()
            await asyncio.gather(server.serving, return_exceptions=True)
            if self._spans is not None:
                await asyncio.to_thread(self._spans.close)
            if self._recorder is not None:
                await asyncio.to_thread(self._recorder.close)

    def _end_in_order(self) -> EndReply:
        """Shut the process down in order, as SIGTERM does."""
        self._stopping.set()
        grace_s = self.config.notice_s + self.config.grace_s
        return EndReply(num_requests=self.dispatcher.num_requests, grace_s=grace_s)

    async def _finish(self, server: HttpServer) -> None:
        """Announce the shutdown, stop accepting a while later, let requests in progress finish, then fail the rest."""
        self.service.stopping = True
        server.hang_up_after_answers()
        _log.info("conductor.ending", requests=self.dispatcher.num_requests, notice_s=self.config.notice_s)
        await asyncio.sleep(self.config.notice_s)
        await server.stop_accepting()
        await asyncio.sleep(min(self.config.notice_s, _LINGER_S))
        self.service.bodies.stop()
        server.stop()
        _log.info("conductor.finishing", requests=self.dispatcher.num_requests, grace_s=self.config.grace_s)
        calls = asyncio.create_task(self.inference.stop(self.config.grace_s + _LINGER_S))
        await asyncio.wait([server.serving, calls], timeout=self.config.grace_s)
        self.dispatcher.fail_all(NodeUnavailable("the conductor is shutting down; retry at another one"))
        await asyncio.wait([server.serving], timeout=_LINGER_S)  # the failures are answered

    async def _request_snapshots(self) -> None:
        every_s = self.config.snapshot_every_s
        while every_s > 0:
            await asyncio.sleep(every_s)
            self.dispatcher.registry.request_snapshots()

    async def _observe(self) -> None:
        while True:
            self.dispatcher.observe()
            self.dashboard.observe()
            await asyncio.sleep(_OBSERVE_S)


async def serve(process: Process, config: ConductorConfig) -> None:
    """Run until the process is asked to stop."""
    async with open_discovery(config.cluster, config.master) as discovery:
        conductor = Conductor(config, f"conductor-{process.generation:012x}", process.registry, process.stopping)
        await process.unless_stopping(meet(discovery))
        async with (
            conductor.running(discovery, config.port, process.run_dir),
            beside(*_of_store(conductor, config)),
        ):
            attributes = {group.ATTRIBUTE: conductor.peers.published_address, "scheme": config.scheme}
            instance = instance_of(process, conductor.address, attributes=attributes)
            registration = await process.unless_stopping(enter(discovery, instance))
            process.ready(instance.id, conductor.address, busy=lambda: conductor.dispatcher.num_requests > 0)
            await process.stopping.wait()
            await registration.close()


def _of_store(conductor: Conductor, config: ConductorConfig) -> list[Coroutine[Any, Any, None]]:
    """Return the tasks that need a store's master; none without a cluster."""
    if config.cluster == NO_DISCOVERY:
        return []
    router, mirror, count = conductor.dispatcher.router, conductor.dispatcher.mirror, conductor.metrics.hot_chunks.inc
    copies = Replicator(router.hot, mirror, partial(request_copies, Masters.of(config.master)), SystemClock(), count)
    return [mirror.follow_master(config.master), copies.run()]


COMMAND = command(
    "conductor",
    ConductorConfig,
    lambda config: run(Role.CONDUCTOR, config, serve),
    "Run a conductor: the HTTP API in front of prefill and decode workers.",
)
