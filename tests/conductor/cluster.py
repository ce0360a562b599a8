"""A conductor over real HTTP in front of fake workers over real gRPC, for tests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
from prometheus_client import CollectorRegistry

from tanghulu.conductor.main import Conductor, ConductorConfig
from tanghulu.types import Place, Role
from tests.conductor.fake_worker import FakeWorker
from tests.discovery.memory import MemoryDiscovery, MemoryRegistry


class Cluster:
    """What a test holds in its hands."""

    def __init__(self, conductor: Conductor, discovery: MemoryDiscovery, run_dir: Path) -> None:
        self.conductor = conductor
        self.discovery = discovery
        self.run_dir = run_dir
        self.workers: list[FakeWorker] = []
        self.http = httpx.AsyncClient(base_url=f"http://{conductor.address}", timeout=60, trust_env=False)

    async def add(self, role: Role = Role.BOTH, **options: object) -> FakeWorker:
        """A registered and connected worker."""
        worker = FakeWorker(f"{role.value}-{len(self.workers)}", role, self.run_dir, **options)
        self.workers.append(worker)
        await worker.start(self.discovery)
        await self.until(lambda: self.registry.workers.get(worker.id) and self.registry.workers[worker.id].usable)
        return worker

    @property
    def dispatcher(self):
        return self.conductor.dispatcher

    @property
    def registry(self):
        return self.dispatcher.registry

    async def until(self, condition) -> None:
        """Let the loop turn until ``condition()`` holds."""
        async with asyncio.timeout(30):
            while not condition():  # noqa: ASYNC110 - what it looks at has no hook for tests
                await asyncio.sleep(0.001)

    def migrations(self, kind: str, outcome: str) -> float:
        wanted = {"model": "tiny", "kind": kind, "outcome": outcome}.items()
        (family,) = self.conductor.metrics.migrations.collect()
        samples = [each for each in family.samples if each.name == "tanghulu_migrations_total"]
        return sum(each.value for each in samples if wanted <= each.labels.items())

    def metric(self, name: str, **labels: str) -> float:
        value = self.conductor.service.metrics.get_sample_value(f"tanghulu_conductor_{name}", labels)
        return value or 0.0


@contextlib.asynccontextmanager
async def running_cluster(run_dir: Path, **options: object) -> AsyncIterator[Cluster]:
    defaults: dict[str, Any] = {"port": 0, "grace_s": 0.0, "notice_s": 0.0, "queue_timeout_s": 10.0, "place": Place()}
    config = ConductorConfig(**defaults | options)
    conductor = Conductor(config, "conductor-test", CollectorRegistry())
    async with MemoryDiscovery(MemoryRegistry()) as discovery, conductor.running(discovery, 0, run_dir):
        cluster = Cluster(conductor, discovery, run_dir)
        try:
            yield cluster
            cluster.dispatcher.check()
        finally:
            await cluster.http.aclose()
            for worker in cluster.workers:
                await worker.stop()
