"""``tanghulu router``: the global router in front of pools with ``--pools``, routing as a service without it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry

from tanghulu.conductor import route_rights
from tanghulu.conductor.engines.events import VllmFollower, parse_sources
from tanghulu.conductor.index.assumed import DEFAULT_MAX_BLOCKS, AssumedBlocks
from tanghulu.conductor.pool_router import main as pools_main
from tanghulu.conductor.pool_router.relaying import RelayClient
from tanghulu.conductor.routing.overrides import RoutingPolicies, parse_weights
from tanghulu.conductor.routing.policies.registry import POLICY_NAMES
from tanghulu.conductor.routing_service.api import Hasher, RouterApi
from tanghulu.conductor.routing_service.generate import Generator
from tanghulu.conductor.routing_service.grpc_api import RIGHTS, RouterServicer
from tanghulu.conductor.routing_service.http_api import make_app
from tanghulu.conductor.routing_service.service import RoutingService
from tanghulu.conductor.routing_service.worker_networks import PRIVATE, WorkerNetworks
from tanghulu.errors import ConfigError
from tanghulu.hashing import DEFAULT_BLOCK_TOKENS, HASH_FUNCTIONS, root_hash
from tanghulu.protos import router_pb2_grpc
from tanghulu.rpc.grpc_port import GrpcPort
from tanghulu.runtime.clock import SystemClock
from tanghulu.runtime.config import command, option
from tanghulu.runtime.kv_endpoints import EventEndpoints
from tanghulu.runtime.master_options import SecretOptions
from tanghulu.runtime.process import Process, run
from tanghulu.runtime.tasks import beside
from tanghulu.types import Address, BlockHash, Fingerprint, InstanceId, Role
from tanghulu.web.server import HttpServer, Server

#: Help of --assume-cached-s, whose default depends on the command.
ASSUME_HELP = (
    "routing: seconds for which the blocks of a prompt are assumed cached at its worker; 0 relies on KV events"
)


@dataclass(frozen=True, kw_only=True)
class RoutingOptions(SecretOptions):
    """The options of routing as a service, whoever asks for it."""

    policy: str = option("ttft-min", "routing: policy", choices=POLICY_NAMES)
    policy_weights: str = option("", "routing: weights of the policies, such as alpha=0.7,temperature=0.2")
    block_tokens: int = option(DEFAULT_BLOCK_TOKENS, "routing: tokens per block", least=1)
    block_bytes: int = option(2 << 20, "routing: bytes of KV per block", size=True, least=1)
    assume_cached_s: float = option(0.0, ASSUME_HELP, least=0)
    assume_cached_blocks: int = option(DEFAULT_MAX_BLOCKS, "routing: limit on assumed blocks of one worker", least=1)
    worker_networks: str = option(PRIVATE, "routing: networks that workers' addresses may be in: 10.1.0.0/16,…")

    def check_routing(self) -> None:
        """Raise ConfigError for options that are not of the right form."""
        WorkerNetworks(self.worker_networks)
        parse_weights(self.policy_weights)

    def routing_service(self, router_id: str, *, encrypted: bool = False) -> RoutingService:
        """Return a service without workers; they have to be ``encrypted`` if it is true."""
        policies = RoutingPolicies(self.policy, parse_weights(self.policy_weights, router_id))
        assumed = AssumedBlocks(self.assume_cached_s, self.assume_cached_blocks) if self.assume_cached_s else None
        networks = WorkerNetworks(self.worker_networks, encrypted=encrypted)
        return RoutingService(policies, self.block_tokens, self.block_bytes, assumed, networks)


@dataclass(frozen=True, kw_only=True)
class RouterConfig(RoutingOptions, pools_main.GlobalRouterConfig):
    """Options of both kinds of router; those of routing and gRPC concern the service, without --pools."""

    grpc_port: int = option(8101, "service: port of its gRPC API; 0 picks one")
    block_hash: str = option("xxh3_128", "service: hash function of blocks", choices=tuple(HASH_FUNCTIONS))
    root_hash: str = option("", "service: parent hash of the first block, in hex; default: that of an unnamed model")
    vllm_events: str = option(
        "", "service: vLLM workers whose KV events are followed, worker=tcp://host:5557[|tcp://host:5558 for replay],…"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_routing()
        parse_sources(self.vllm_events)
        self.hasher()

    def hasher(self) -> Hasher:
        """Return the hasher of prompts given as tokens. Raises ConfigError for a root that is not hex."""
        try:
            root = BlockHash(bytes.fromhex(self.root_hash))
        except ValueError:
            raise ConfigError(f"--root-hash {self.root_hash!r} is not hex") from None
        unnamed = root_hash(Fingerprint(bytes(16)), algorithm=self.block_hash, key=self.shared_secret().naming_key)
        return Hasher(root or unnamed, self.block_tokens, self.block_hash)


class RouterServer:
    """The routing service on its two ports."""

    def __init__(self, config: RouterConfig, registry: CollectorRegistry, router_id: str = "") -> None:
        self.config = config
        self.service = config.routing_service(router_id, encrypted=bool(config.tls))
        self._server = Server(config, config.host)
        self.address = self.grpc_address = Address("", 0)
        self.api = RouterApi(self.service, config.hasher(), SystemClock())
        self._registry = registry

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[RouterServer]:
        """Serve inside the block. Raises ConfigError if a port is taken, or a library for KV events is missing."""
        config, sources = self.config, parse_sources(self.config.vllm_events)
        followers = [self._follower(worker, endpoints) for worker, endpoints in sources.items()]
        client = RelayClient(config.silence_timeout_s, config.tls)
        generator = Generator(self.api, SystemClock(), client)
        routes = make_app(self.api, self._registry, config.max_body_size, generator)
        app = self._server.authorized(routes, route_rights.ROUTING_SERVICE)
        async with (
            contextlib.aclosing(generator),
            self._server.serving(app, config.port, config.grace_s) as server,
            self._serving_grpc(generator, server),
            beside(*(follower.run() for follower in followers)),
        ):
            self.address = Address(config.reachable_host, server.address.port)
            yield self

    @contextlib.asynccontextmanager
    async def _serving_grpc(self, generator: Generator, server: HttpServer) -> AsyncIterator[None]:
        config, keys = self.config, self._server.keys
        add = partial(router_pb2_grpc.add_RouterServicer_to_server, RouterServicer(self.api, generator, keys))
        port = GrpcPort(config, add, keys, RIGHTS)
        await port.start(Address(config.host, config.grpc_port))
        self.grpc_address = port.address
        try:
            yield
        finally:
            server.stop()
            await port.stop(config.grace_s)

    def _follower(self, worker: InstanceId, endpoints: EventEndpoints) -> VllmFollower:
        """Register ``worker`` and follow its events; a later registration may set its role and place."""
        self.service.put_worker(worker, Role.BOTH)
        return VllmFollower(worker, endpoints, self.service.applier(worker))


async def serve(process: Process, config: RouterConfig) -> None:
    """Run until the process is asked to stop."""
    if config.pools is not None:
        await pools_main.serve(process, config)
        return
    router_id = f"router-{process.generation:012x}"
    async with RouterServer(config, process.registry, router_id).running() as server:
        process.ready(process.instance_id(server.address.port), server.address)
        await process.stopping.wait()


COMMAND = command(
    "router",
    RouterConfig,
    lambda config: run(Role.ROUTER, config, serve),
    "Run a router: with --pools one that forwards requests to pools of workers, by their length and their targets; "
    "without it routing as a service (HTTP and gRPC) for the gateways of any engine.",
)
