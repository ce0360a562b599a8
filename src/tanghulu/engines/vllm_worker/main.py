"""``tanghulu vllm-worker``: vLLM's engine in a process to which conductors open sessions."""

from __future__ import annotations

import contextlib

from tanghulu.discovery.base import WHOLE_REQUESTS
from tanghulu.discovery.entering import meet
from tanghulu.discovery.open import open_discovery
from tanghulu.engines.vllm_worker.config import VllmWorkerConfig
from tanghulu.engines.vllm_worker.llm import require_vllm
from tanghulu.errors import NodeUnavailable
from tanghulu.runtime.config import command
from tanghulu.runtime.process import Process, run
from tanghulu.types import Role


async def serve(process: Process, config: VllmWorkerConfig) -> None:
    """Find the cluster, start vLLM, open the port, serve sessions until stopped, then drain.

    Raises NodeUnavailable if vLLM ends.
    """
    from tanghulu.engines.vllm_worker.server import VllmWorkerServer

    require_vllm()
    whole = {WHOLE_REQUESTS: "yes"} if process.role is Role.BOTH else {}
    async with contextlib.AsyncExitStack() as stack:
        discovery = await stack.enter_async_context(open_discovery(config.discovery, config.master))
        await process.unless_stopping(meet(discovery))
        worker = await stack.enter_async_context(VllmWorkerServer(process, config))
        registered = await stack.enter_async_context(worker.registered(discovery, whole))
        await worker.until(process.stopping)
        await registered.aclose()  # conductors send nothing new from here on
        if worker.failure is not None:
            raise NodeUnavailable("vLLM's engine has ended; see its log") from worker.failure
        await worker.drain()


def _run(config: VllmWorkerConfig) -> None:
    run(Role(config.role), config, serve)


COMMAND = command("vllm-worker", VllmWorkerConfig, _run, "Run a worker that computes with vLLM.")
