"""A conductor in front of fake vLLM servers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tanghulu.conductor.engines import session, source
from tests.conductor.cluster import Cluster, running_cluster
from tests.conductor.engines.fake_vllm import FakeVllm, write_model


class Front:
    """What a test holds in its hands: the conductor, and its servers."""

    def __init__(self, cluster: Cluster, servers: list[FakeVllm]) -> None:
        self.cluster, self.servers = cluster, servers

    async def up(self, *servers: FakeVllm) -> None:
        """Wait until ``servers`` may be used."""
        workers = self.cluster.registry.workers
        names = [f"127.0.0.1:{each.port}" for each in servers or self.servers]
        await self.cluster.until(lambda: all(name in workers and workers[name].usable for name in names))
        for each in servers or self.servers:
            if each.events is not None:
                await asyncio.wait_for(asyncio.shield(each.events.subscribed), 30)

    async def complete(self, prompt: str = "the rain in Spain", **fields: object) -> dict:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0, **fields}
        answer = await self.cluster.http.post("/v1/completions", json=body)
        return answer.json() | {"status": answer.status_code}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
def fronts(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Make fronts: ``async with fronts(2) as front``. They look at their servers more often than in life."""
    monkeypatch.setattr(session, "LOOK_S", 0.02)
    monkeypatch.setattr(session, "BEAT_S", 0.1)
    monkeypatch.setattr(source, "FILE_S", 0.02)
    monkeypatch.setattr(source, "LOOKUP_S", 0.05)

    @contextlib.asynccontextmanager
    async def make(num: int = 1, *, servers: list[FakeVllm] | None = None, **options: object) -> AsyncIterator[Front]:
        made = servers if servers is not None else [FakeVllm(folder) for _ in range(num)]
        for each in made:
            await each.start()
        engine = options.pop("engine", None) or tuple(each.flag for each in made)
        try:
            async with running_cluster(tmp_path, engine=engine, **options) as cluster:
                yield Front(cluster, made)
        finally:
            for each in made:
                await each.stop()

    return make
