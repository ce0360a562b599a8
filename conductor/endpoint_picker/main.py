"""``tanghulu epp``: the endpoint picker of an inference gateway, for servers that speak HTTP themselves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc.aio
from prometheus_client import CollectorRegistry

from tanghulu.auth.api_keys import ApiKeysFile, KeyRight
from tanghulu.auth.tls import REFRESH_S
from tanghulu.conductor.endpoint_picker import health
from tanghulu.conductor.endpoint_picker.endpoints import Endpoints, parse_endpoints
from tanghulu.conductor.endpoint_picker.ext_proc import SERVICE, ExtProc
from tanghulu.conductor.endpoint_picker.health import Health
from tanghulu.conductor.endpoint_picker.metrics import PickerMetrics
from tanghulu.conductor.endpoint_picker.picker import EndpointPicker
from tanghulu.conductor.endpoint_picker.prompts import PromptReader, read_card
from tanghulu.conductor.engines.events import VllmFollower
from tanghulu.conductor.engines.model import BLOCK_HASH
from tanghulu.conductor.engines.names import BlockNames, NamingDecoder
from tanghulu.conductor.engines.source import EngineSource
from tanghulu.conductor.inference.service import DEFAULT_BODY_BYTES
from tanghulu.conductor.routing_service.api import Hasher, RouterApi
from tanghulu.conductor.routing_service.main import ASSUME_HELP, RoutingOptions
from tanghulu.conductor.text.served_model import ServedModel
from tanghulu.errors import ConfigError
from tanghulu.hashing import root_hash
from tanghulu.rpc.grpc_port import GrpcPort
from tanghulu.runtime.clock import SystemClock
from tanghulu.runtime.config import command, option
from tanghulu.runtime.kv_endpoints import EventEndpoints
from tanghulu.runtime.master_options import HttpOptions, ServerOptions
from tanghulu.runtime.process import Process, ProcessConfig, run
from tanghulu.runtime.tasks import beside
from tanghulu.types import Address, Fingerprint, InstanceId, Role
from tanghulu.web.bodies import Bodies

#: Bytes of bodies held at one time.
_ROOM_BYTES: Final = 256 << 20
RIGHTS: Final[Mapping[str, KeyRight | None]] = {
    f"/{SERVICE}/Process": KeyRight.INFERENCE,
    **{f"/{health.SERVICE}/{name}": None for name in health.METHODS},
}


@dataclass(frozen=True, kw_only=True)
class EndpointPickerConfig(RoutingOptions, HttpOptions, ProcessConfig):
    """Options of the endpoint picker."""

    endpoints: str = option("", "servers behind the gateway, host:port,…; a name stands for all of its addresses")
    port: int = option(9002, "port of Envoy's ext_proc; 0 picks one")
    health_port: int = option(9003, "port of gRPC's health checks, without TLS and keys; 0 picks one")
    model: Path | None = option(None, "folder with the model's tokenizer; default: prompts are compared as text")
    block_tokens: int = option(16, "routing: tokens per block", least=1)
    assume_cached_s: float = option(300.0, ASSUME_HELP, least=0)
    kv_events: bool = option(False, "follow the KV events that vLLM's servers list at /kv_event_sources")
    health_path: str = option("/health", "path at a server that answers 200 while it is healthy")
    health_interval_s: float = option(1.0, "seconds between health checks of a server; 0 disables them", least=0)
    max_requests_per_worker: int = option(0, "requests at a server before 429; 0 disables the limit", least=0)
    max_body_size: int = option(DEFAULT_BODY_BYTES, "largest request body", size=True, least=1)
    conformance_headers: bool = option(False, "let the headers of conformance tests select and report endpoints")
    grace_s: float = option(10.0, "seconds for which running requests may continue at shutdown", least=0)

    def __post_init__(self) -> None:
        self.check_routing()
        parse_endpoints(self.endpoints)
        if not self.health_path.startswith("/"):
            raise ConfigError(f"--health-path {self.health_path!r} must begin with a slash")
        if self.kv_events and self.model is None:
            raise ConfigError("--kv-events needs --model FOLDER: events have the tokens of blocks")


class EndpointPickerServer:
    """The endpoint picker without its process."""

    def __init__(self, config: EndpointPickerConfig, registry: CollectorRegistry, picker_id: str = "") -> None:
        """Read the model's files. Raises ConfigError, ModelUnsupported."""
        self.config = config
        self.service = config.routing_service(picker_id)
        self.picker = EndpointPicker(self.service, config.max_requests_per_worker)
        self.health = Health(SERVICE)
        self.address = self.health_address = Address("", 0)
        self._keys = keys = None if config.api_keys is None else ApiKeysFile(config.api_keys)
        self._card = None if config.model is None else read_card(config.model, config.block_tokens)
        self._naming_key = config.shared_secret().naming_key
        fingerprint = Fingerprint(bytes(16)) if self._card is None else self._card.fingerprint
        root = root_hash(fingerprint, algorithm=BLOCK_HASH, key=self._naming_key)
        api = RouterApi(self.service, Hasher(root, config.block_tokens, BLOCK_HASH), SystemClock())
        model = None if self._card is None else ServedModel(self._card)
        self.metrics = PickerMetrics(registry, lambda: len(self.picker.ready), lambda: self.service.num_requests)
        self._ext_proc = ExtProc(
            self.picker,
            PromptReader(api, model, self.picker.adapter_path),
            Bodies(config.max_body_size, _ROOM_BYTES),
            SystemClock(),
            self.metrics,
            keys=keys,
            test_headers=config.conformance_headers,
        )
        self._port = GrpcPort(config, self._add_services, keys, RIGHTS, flag="--port")
        self._health_port = GrpcPort(ServerOptions(), self.health.add_to, flag="--health-port")

    def _add_services(self, server: grpc.aio.Server) -> None:
        self._ext_proc.add_to(server)
        self.health.add_to(server)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[EndpointPickerServer]:
        """Serve inside the block. Raises ConfigError if a port is taken, or a library for KV events is missing."""
        config = self.config
        health = config.health_path, config.health_interval_s
        follow = self._follow if config.kv_events else None
        look, servers = self.service.networks.addresses_of, parse_endpoints(config.endpoints)
        source = EngineSource(servers, None, config.namespace, config.place, look)
        endpoints = Endpoints(self.picker, source, health, follow, lambda: self.health.set(bool(self.picker.ready)))
        try:
            await self._port.start(Address(config.host, config.port))
            await self._health_port.start(Address(config.host, config.health_port))
            self.address, self.health_address = self._port.address, self._health_port.address
            async with beside(endpoints.run(), self._follow_keys()):
                yield self
        finally:
            self.health.set(False)
            await self._port.stop(config.grace_s)
            await self._health_port.stop(0)

    async def _follow_keys(self) -> None:
        while self._keys is not None:
            await asyncio.sleep(REFRESH_S)
            await asyncio.to_thread(self._keys.refresh)

    async def _follow(self, worker: InstanceId, endpoints: EventEndpoints) -> None:
        """Follow the KV events of an endpoint; its blocks are named by their tokens."""
        card, key = self._card, self._naming_key
        assert card is not None
        apply = self.service.applier(worker)
        await VllmFollower(worker, endpoints, apply, lambda: NamingDecoder(BlockNames(card, 0, key))).run()


async def serve(process: Process, config: EndpointPickerConfig) -> None:
    """Run until the process is asked to stop."""
    picker_id = f"epp-{process.generation:012x}"
    async with EndpointPickerServer(config, process.registry, picker_id).running() as server:
        process.ready(process.instance_id(server.address.port), server.address)
        await process.stopping.wait()


COMMAND = command(
    "epp",
    EndpointPickerConfig,
    lambda config: run(Role.ROUTER, config, serve),
    "Run an endpoint picker for gateways (Gateway API Inference Extension, Envoy's ext_proc).",
)
