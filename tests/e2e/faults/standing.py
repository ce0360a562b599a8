"""The standing cluster of the matrix: mock workers behind breakable paths, and two conductors, one that never moves."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.faults.asking import KINDS, Answer, Ask, ask
from tests.e2e.faults.parts import Part, Together, Worker

#: A gate stands closed while requests gather; that must not be taken for a hang. Three beats of a second are the least.
WORKER_TIMEOUT_S = 8
MOCK = ("--engine", "mock", "--model", "mock", "--debug", "checks=true", "--kv-memory", "4MiB", "--block-tokens", "16")
#: So fast that all requests of a cell are computed in one step of a prefill, and an answer takes a second.
FAST = (*MOCK, "--debug", "mock_speedup=40", "--max-num-batched-tokens", "8192")
MOVES = 3


async def until(condition: Callable[[], Any], deadline_s: float = 90.0, what: str = "") -> Any:
    """The first true value of ``condition``, plain or awaited."""
    end = time.monotonic() + deadline_s
    while True:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return value
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        await asyncio.sleep(0.02)


class Standing:
    """A master, a store node, two workers of each kind, and a conductor for each limit on moves, by that limit."""

    def __init__(
        self,
        folder: Path,
        engine: Sequence[str] = FAST,
        limits: Sequence[int] = (0, MOVES),
        timeout_s: int = WORKER_TIMEOUT_S,
    ) -> None:
        self.master = Part(folder, "master", "master")
        at = ("--master", self.master.address)
        self.node = Part(folder, "node", "node", *at, "--memory", "64MiB")
        flags = (*at, *engine, "--grace-s", "1")
        self.prefill = [Worker(folder, f"prefill-{i}", "prefill", *flags) for i in range(2)]
        self.decode = [Worker(folder, f"decode-{i}", "decode", *flags) for i in range(2)]
        self.workers = [*self.prefill, *self.decode]
        self.conductors = {
            limit: Part(folder, f"conductor-{limit}", "conductor", *at, "--max-redispatches", str(limit),
                        "--worker-timeout-s", str(timeout_s), "--notice-s", "0", "--grace-s", "2")
            for limit in limits
        }  # fmt: skip
        self.running = Together(self.master, self.node, *self.workers, *self.conductors.values())

    def logs(self) -> str:
        return "\n".join(part.log() for part in self.running.parts)


class Client:
    """Asks a standing cluster; belongs to one event loop."""

    def __init__(self, cluster: Standing) -> None:
        self.cluster = cluster
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self.http = httpx.AsyncClient(timeout=600, trust_env=False, limits=limits)

    async def ask(self, limit: int, one: Ask, **more: Any) -> Answer:
        return await ask(self.http, self.cluster.conductors[limit].url, one, **more)

    async def server_info(self, limit: int) -> dict[str, Any]:
        reply = await self.http.get(f"{self.cluster.conductors[limit].url}/server_info")
        info: dict[str, Any] = reply.json()
        return info

    async def requests(self) -> list[dict[str, Any]]:
        """The requests under way at all conductors: state, worker, generated tokens."""
        states = [await self.http.get(f"{each.url}/dashboard/state") for each in self.cluster.conductors.values()]
        return [request for state in states for request in state.json()["requests"]]

    async def is_whole(self) -> bool:
        """Whether every conductor is connected to every worker and has nothing under way."""
        wanted = {worker.id for worker in self.cluster.workers}
        for limit in self.cluster.conductors:
            info = await self.server_info(limit)
            connected = {each["id"] for each in info["workers"] if each["connected"]}
            if info["num_requests"] or connected != wanted:
                return False
        return True

    async def metric(self, part: Part, name: str) -> float:
        """The sum of a metric's samples at a process."""
        text = (await self.http.get(part.metrics_url)).text
        lines = [line.rpartition(" ") for line in text.splitlines() if line.startswith((f"{name} ", name + "{"))]
        return sum(float(value) for _, _, value in lines)


def undisturbed(cluster: Standing, kinds: Sequence[Ask] = KINDS) -> dict[Ask, Answer]:
    """The answers of all ``kinds`` at once while nothing is wrong, each of them whole."""

    async def ask_all() -> list[Answer]:
        async with connected(cluster) as client:
            return await asyncio.gather(*(client.ask(MOVES, one) for one in kinds))

    answers = dict(zip(kinds, asyncio.run(ask_all()), strict=True))
    for one, answer in answers.items():
        assert answer.finishes == ["length"], answer
        assert answer.usage["completion_tokens"] == one.max_tokens
        assert answer.num_done == one.stream
    return answers


@contextlib.asynccontextmanager
async def connected(cluster: Standing) -> AsyncIterator[Client]:
    """A client, as soon as all workers are connected and nothing is under way."""
    client = Client(cluster)
    try:
        await until(client.is_whole, what="all workers are connected, nothing is under way")
        yield client
    finally:
        await client.http.aclose()
