"""``tanghulu master``: the process. Opens the port, registers the calls of both protocols, ticks, closes cleanly."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from random import Random

from tanghulu.auth.tokens import TokensFile
from tanghulu.discovery.entering import instance_of
from tanghulu.errors import ConfigError, InvalidRequest
from tanghulu.masters import Masters
from tanghulu.rpc.authorizer import Authorizer
from tanghulu.rpc.fast_port import DESCRIPTORS_PER_CONNECTION, FastPort
from tanghulu.rpc.fast_server import FastService
from tanghulu.rpc.latency import LatencyCollector
from tanghulu.runtime import process as processes
from tanghulu.runtime.clock import SystemClock
from tanghulu.runtime.config import command, option
from tanghulu.runtime.limits import allow_descriptors
from tanghulu.runtime.master_options import PortOptions
from tanghulu.runtime.process import Process, ProcessConfig, StoppedEarly
from tanghulu.store.master.core import Master
from tanghulu.store.master.directory.rebuild import REBUILD_S
from tanghulu.store.master.election.ownership import Duties, EtcdOwnership, Ownership
from tanghulu.store.master.metrics import MasterMetrics
from tanghulu.store.master.rpc.directory_service import DirectoryCalls
from tanghulu.store.master.rpc.membership_service import MembershipService
from tanghulu.store.master.server import MasterServer
from tanghulu.types import Address, Role


@dataclass(frozen=True, kw_only=True)
class MasterConfig(PortOptions, ProcessConfig):
    """The options of ``tanghulu master``."""

    port: int = option(7400, "port to listen on; 0 picks one")
    copy_rate: int = option(256 << 20, "limit on bytes per second copied through one node", size=True)
    etcd: str = option(
        "",
        "share the keys with the other masters of this etcd",
        metavar="HOST:PORT[,HOST:PORT...]",
    )
    election_ttl_s: float = option(
        2.0, "seconds after which a lost master is replaced; etcd rounds up to whole seconds"
    )
    rebuild_s: float = option(
        REBUILD_S,
        "seconds after which a node that has not reached a new master has left; the lease of a node",
        most=600,
        debug=True,
    )
    seed: int = option(0, "seed of random placement; 0 picks one at each start", debug=True)

    def __post_init__(self) -> None:
        PortOptions.__post_init__(self)
        if self.copy_rate < 1:
            raise ConfigError(f"--copy-rate {self.copy_rate} must be at least 1 byte per second")
        if not 1 <= self.election_ttl_s <= 60:
            raise ConfigError(f"--election-ttl-s {self.election_ttl_s:g} is not within 1..60 seconds")


async def serve(process: Process, config: MasterConfig, ownership: Ownership | None = None) -> None:
    """Serve Membership and Directory until the process is stopped. ``ownership`` None: of all ranges."""
    allow_descriptors(DESCRIPTORS_PER_CONNECTION * config.max_connections)
    clock = SystemClock()
    rng = Random(config.seed or process.generation)
    shares = bool(config.etcd)
    master = Master(process.generation, clock.now_s(), config.rebuild_s, config.copy_rate, rng, shares=shares)
    metrics = MasterMetrics(process.registry)
    metrics.observe(master)
    server = MasterServer(master, clock, metrics, rng, ownership=ownership or Ownership())
    service = FastService(max_connections=config.max_connections)
    process.registry.register(LatencyCollector(service.latencies))
    tokens = None if config.tokens is None else TokensFile(config.tokens)
    fast_port = FastPort(service, process.run_dir, "master", config.server_tls())
    address = await fast_port.bind(config.host, config.port, config.reachable_host)
    if tokens is not None:
        tokens.answer_at(address, Address(config.host, address.port))
    running: list[Coroutine[None, None, None]] = [server.run()]
    if config.etcd:
        server.ownership = several = _ownership(process, config, address, server)
        running.append(several.run())
        metrics.observe_ownership(several)
    calls = DirectoryCalls(server)
    metrics.observe_waits(calls.waiting.board)
    calls.serve(service)
    MembershipService(server).serve(service)
    tasks: list[asyncio.Task[None]] = []
    if tokens is not None:
        authorizer = Authorizer(tokens)
        authorizer.authorize(service)
        tasks.append(asyncio.create_task(authorizer.watch(service)))
    await fast_port.open()
    tasks += map(asyncio.create_task, running)
    process.ready(process.instance_id(address.port), address)
    try:
        with contextlib.suppress(StoppedEarly):
            waiting = asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in (await process.unless_stopping(waiting))[0]:
                task.result()  # a master that ends no leases must not keep running
    finally:
        for task in tasks:  # resigning first: the others elect while this one shuts down
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await fast_port.close(grace_s=0.2)


def _ownership(process: Process, config: MasterConfig, address: Address, server: MasterServer) -> EtcdOwnership:
    instance = instance_of(process, address)
    duties = Duties(server.own, server.disown, server.lead, server.lead_no_more, server.update_nodes)
    return EtcdOwnership(_etcd(config), instance, config.election_ttl_s, server.clock, duties)


def _etcd(config: MasterConfig) -> Sequence[Address]:
    try:
        return Masters.parse(config.etcd.removeprefix("etcd://")).addresses
    except InvalidRequest as error:
        raise ConfigError(f"--etcd: {error.message}") from None


COMMAND = command(
    "master",
    MasterConfig,
    lambda config: processes.run(Role.MASTER, config, serve),
    "Run a master, which tracks live processes and the keys on each node.",
)
