"""The worker process: a model behind a port. ``tanghulu prefill``, ``decode`` and ``worker`` all run this."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tanghulu.discovery.entering import meet
from tanghulu.discovery.open import open_discovery
from tanghulu.errors import ConfigError
from tanghulu.runtime.config import command, option
from tanghulu.runtime.extras import install_command
from tanghulu.runtime.process import Process, host_id, run
from tanghulu.types import Role
from tanghulu.workers.compute.process_tuning import wait_shortly
from tanghulu.workers.config import WorkerConfig

if TYPE_CHECKING:
    from tanghulu.workers.loading.loaded_model import LoadedModel


async def serve(process: Process, config: WorkerConfig) -> None:
    """Find the other processes, load the model, open the port, serve sessions until stopped, then drain."""
    async with open_discovery(config.discovery, config.master) as discovery:
        await process.unless_stopping(meet(discovery))
        process.progress("importing torch", 0.0)
        loaded = await asyncio.to_thread(_load, process, config)
        from tanghulu.workers.assembly import WorkerServer

        async with (
            WorkerServer(process, loaded) as worker,
            worker.registered(discovery, {"host_id": host_id()}) as registered,
        ):
            await process.stopping.wait()
            await registered.aclose()  # conductors send nothing new from here on, and keep their sessions
            await worker.drain()


def _load(process: Process, config: WorkerConfig) -> LoadedModel:
    """Load the model, in a thread: it takes seconds, in which the process must answer signals."""
    wait_shortly()
    try:
        if config.engine == "mock":
            from tanghulu.workers.mock.loading import load
        else:
            from tanghulu.workers.loading.torch_loading import load
    except ModuleNotFoundError as error:
        raise ConfigError(f"a worker needs the package {error.name}: {install_command('worker')}") from error

    return load(config, lambda fraction: process.progress("loading the model", fraction))


PREFILL = command("prefill", WorkerConfig, lambda c: run(Role.PREFILL, c, serve), "Run a prefill worker.")
DECODE = command("decode", WorkerConfig, lambda c: run(Role.DECODE, c, serve), "Run a decode worker.")


@dataclass(frozen=True, kw_only=True)
class AnyWorkerConfig(WorkerConfig):
    """Options of ``tanghulu worker``."""

    role: str = option("both", "phases to run", choices=("both", "prefill", "decode"))


def _run_any(config: AnyWorkerConfig) -> None:
    role = {"both": Role.BOTH, "prefill": Role.PREFILL, "decode": Role.DECODE}[config.role]
    run(role, config, serve)


WORKER = command("worker", AnyWorkerConfig, _run_any, "Run a worker that prefills and decodes.")
