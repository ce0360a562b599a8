"""``tanghulu master``: the process. Opens the door, registers both edges, ticks, closes cleanly."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from random import Random

from tanghulu import process as processes
from tanghulu.clock import SystemClock
from tanghulu.config import command, option
from tanghulu.errors import ConfigError
from tanghulu.process import Process, ProcessConfig
from tanghulu.protos import directory_pb2_grpc, membership_pb2_grpc
from tanghulu.rpc.door import Door
from tanghulu.rpc.fast_server import FastService
from tanghulu.store.master.core import Master
from tanghulu.store.master.directory_service import DirectoryCalls, DirectoryService
from tanghulu.store.master.membership_service import MembershipService
from tanghulu.store.master.metrics import MasterMetrics
from tanghulu.store.master.rebuild import REBUILD_S
from tanghulu.store.master.shell import Shell
from tanghulu.types import Role


@dataclass(frozen=True, kw_only=True)
class MasterConfig(ProcessConfig):
    """The options of ``tanghulu master``."""

    port: int = option(7400, "port to listen on; 0 picks one")
    rebuild_s: float = option(REBUILD_S, "longest time that a new master waits for the nodes' reports")
    seed: int = option(0, "seed of placement's random choices; 0: a different one each start")

    def __post_init__(self) -> None:
        if not 0 <= self.rebuild_s <= 600:
            raise ConfigError(f"--rebuild-s {self.rebuild_s:g} is not within 0..600 seconds")


async def serve(process: Process, config: MasterConfig) -> None:
    """Serve Membership and Directory until the process is told to stop."""
    clock = SystemClock()
    master = Master(process.generation, clock.now_s(), config.rebuild_s)
    metrics = MasterMetrics(process.registry)
    metrics.observe(master)
    shell = Shell(master, clock, metrics, Random(config.seed or process.generation))
    service = FastService()
    door = Door(service, process.run_dir, "master")
    calls = DirectoryCalls(shell)
    calls.serve(service)
    membership_pb2_grpc.add_MembershipServicer_to_server(MembershipService(shell), door.grpc_server)
    directory_pb2_grpc.add_DirectoryServicer_to_server(DirectoryService(shell, calls), door.grpc_server)
    address = await door.start(config.host, config.port, config.reachable_host)
    ticking = asyncio.create_task(shell.run())
    process.ready(process.instance_id(address.port), address)
    try:
        await _first(process.stopping, ticking)
    finally:
        await door.close(grace_s=0.2)
        ticking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await ticking


async def _first(stopping: asyncio.Event, ticking: asyncio.Task[None]) -> None:
    """Until the process is to stop, or ticking fails: a master that ends no leases must not live on."""
    waiting = asyncio.create_task(stopping.wait())
    await asyncio.wait({waiting, ticking}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()


COMMAND = command(
    "master",
    MasterConfig,
    lambda config: processes.run(Role.MASTER, config, serve),
    "Run a master: who is alive, and which node holds which key.",
)
