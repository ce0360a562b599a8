"""``tanghulu vllm-worker``: vLLM's engine in a process to which conductors open sessions."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import structlog

from tanghulu.discovery.base import WHOLE_REQUESTS, Discovery, Instance
from tanghulu.discovery.entering import enter, meet
from tanghulu.discovery.open import open_discovery
from tanghulu.engines.vllm_worker.config import VllmWorkerConfig
from tanghulu.engines.vllm_worker.llm import require_vllm
from tanghulu.errors import NodeUnavailable
from tanghulu.runtime.config import command
from tanghulu.runtime.process import Process, run
from tanghulu.types import Role

if TYPE_CHECKING:
    from tanghulu.engines.vllm_worker.server import VllmWorkerServer

_log = structlog.get_logger(__name__)


async def serve(process: Process, config: VllmWorkerConfig) -> None:
    """Find the cluster, start vLLM, open the port, serve sessions until stopped, then drain.

    Raises NodeUnavailable if vLLM ends.
    """
    from tanghulu.engines.vllm_worker.server import VllmWorkerServer

    require_vllm()
    async with contextlib.AsyncExitStack() as stack:
        discovery = await stack.enter_async_context(open_discovery(config.discovery, config.master))
        await process.unless_stopping(meet(discovery))
        worker = await stack.enter_async_context(VllmWorkerServer(process, config))
        registered = await stack.enter_async_context(_registered(process, config, worker, discovery))
        process.ready(worker.instance_id, worker.address)
        await worker.until(process.stopping)
        await registered.aclose()  # conductors send nothing new from here on
        if worker.failure is not None:
            raise NodeUnavailable("vLLM's engine has ended; see its log") from worker.failure
        await worker.drain(config.grace_s)


@contextlib.asynccontextmanager
async def _registered(
    process: Process, config: VllmWorkerConfig, worker: VllmWorkerServer, discovery: Discovery
) -> AsyncIterator[contextlib.AsyncExitStack]:
    """Register the worker; closing the value ends the registration."""
    instance = Instance(
        id=worker.instance_id,
        role=process.role,
        address=worker.address,
        namespace=config.namespace,
        metrics_address=process.metrics_address,
        place=config.place,
        generation=process.generation,
        unix_path=worker.unix_path,
        attributes={"model": worker.model_name} | ({WHOLE_REQUESTS: "yes"} if process.role is Role.BOTH else {}),
    )
    registration = await process.unless_stopping(enter(discovery, instance))
    async with contextlib.AsyncExitStack() as registered:
        registered.push_async_callback(registration.close)
        yield registered


def _run(config: VllmWorkerConfig) -> None:
    run(Role(config.role), config, serve)


COMMAND = command("vllm-worker", VllmWorkerConfig, _run, "Run a worker that computes with vLLM.")
