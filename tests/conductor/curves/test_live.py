"""The curves of a running conductor: over HTTP, on the metrics page, on the dashboard, and within their bounds."""

from __future__ import annotations

import random
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from tanghulu.conductor.curves import live
from tanghulu.conductor.curves.live import LiveCurves, StoreState
from tanghulu.conductor.metrics import ConductorMetrics
from tanghulu.conductor.stories.recorder import EndedRequest
from tanghulu.errors import InvalidRequest, NodeUnavailable
from tanghulu.types import BlockHash, Role
from tests.conductor.cluster import Cluster, running_cluster
from tests.conductor.key_files import bearer, write_keys

MODELS = 3


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def made(
    memory_bytes: int = MODELS * live.MODEL_BYTES, blocks: int = 1000, eviction: str = ""
) -> tuple[LiveCurves, Clock, Any]:
    card = SimpleNamespace(model="tiny", block_tokens=64, block_bytes=1 << 10)
    load = SimpleNamespace(reported=SimpleNamespace(blocks_total=blocks))
    workers = [SimpleNamespace(card=card, role=role, load=load) for role in (Role.BOTH, Role.DECODE)]
    registry: Any = SimpleNamespace(workers=dict(enumerate(workers)))
    metrics, clock = ConductorMetrics(CollectorRegistry()), Clock()
    return LiveCurves(registry, metrics.curve, metrics.curve_requests, memory_bytes, eviction, clock), clock, metrics


def name(number: int) -> BlockHash:
    return BlockHash(random.Random(number).randbytes(16))


def ended(numbers: range | list[int], model: str = "tiny", tenant: str = "", tokens: int = 0) -> EndedRequest:
    names = [name(number) for number in numbers]
    return EndedRequest(0.0, tokens or 64 * len(names) + 1, 5, names, 64, model=model, tenant=tenant)


async def test_all_that_a_conductor_shows(cluster: Cluster) -> None:
    await cluster.add()
    assert (await cluster.http.get("/debug/curve")).json()["models"] == []
    cluster.conductor.curves._reported_s = -1e9
    body = {"model": "tiny", "prompt": list(range(1, 200)) * 2 + [7], "max_tokens": 2}
    for _ in range(4):
        assert (await cluster.http.post("/v1/completions", json=body)).status_code == 200
    (row,) = (await cluster.http.get("/debug/curve")).json()["models"]
    assert (row["model"], row["eviction"], row["requests"]) == ("tiny", "lru", 4)
    shares = row["tenants"]["*"]["shares"]
    whole = 399 // row["block_tokens"] * row["block_tokens"]
    assert shares["lru"][-1] == pytest.approx(3 * whole / (4 * 399))
    assert shares.keys() == {"lru", "optimum"}
    assert row["tenants"][""]["shares"] == shares
    assert row["mean"]["prompt_tokens"] == 399
    assert cluster.metric("curve_cached_share", model="tiny", eviction="lru", size="10") == shares["lru"][-1]
    assert cluster.metric("curve_requests_total", outcome="counted") == 4
    state = (await cluster.http.get("/dashboard/state")).json()
    assert state["curves"] == [row]


async def test_rights(tmp_path: Path) -> None:
    file = write_keys(tmp_path / "keys.toml", user='rights = ["inference"]', watcher='rights = ["metrics"]')
    async with running_cluster(tmp_path, api_keys=file, curve_memory=0) as cluster:
        assert (await cluster.http.get("/debug/curve")).status_code == 401
        assert (await cluster.http.get("/debug/curve", headers=bearer("user"))).status_code == 403
        shown = bearer("watcher")
        answer = await cluster.http.get("/debug/curve", headers=shown)
        assert answer.status_code == 400
        assert "--curve-memory above 0" in answer.text
        assert (await cluster.http.get("/dashboard/state", headers=shown)).json()["curves"] == []


async def test_memory_of_workers_and_of_the_store_and_its_policy() -> None:
    curves, clock, _ = made()
    curves.add(ended(range(3)))
    assert [row["memory_blocks"] for row in await curves.report()] == [1000]
    curves.store = StoreState(1 << 20, 0, "fifo")
    curves.add(ended(range(3)))
    clock.now_s += live.FRESH_S
    (row,) = await curves.report()
    assert (row["memory_blocks"], row["eviction"]) == (2024, "fifo")
    assert row["tenants"]["*"]["shares"].keys() == {"lru", "fifo", "optimum"}


async def test_a_store_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    curves, _, _ = made()
    curves.add(ended(range(3)))

    async def look() -> StoreState:
        raise NodeUnavailable("down")

    class Done(Exception):
        pass

    async def sleep(seconds: float) -> None:
        raise Done

    monkeypatch.setattr(live.asyncio, "sleep", sleep)
    with pytest.raises(Done):
        await curves.run(look)
    assert [row["requests"] for row in curves.latest] == [1]


async def test_bounds_on_models_and_waiting_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    curves, _, metrics = made()
    for number in range(MODELS + 2):
        curves.add(ended(range(3), model=f"m{number}"))
    assert len(await curves.report()) == MODELS
    monkeypatch.setattr(live, "MAX_WAITING", 10)
    for _ in range(5):
        curves.add(ended(range(4), model="m0"))
    await curves.count()
    counted, dropped = (metrics.curve_requests.labels(each)._value.get() for each in ("counted", "dropped"))
    assert (counted, dropped) == (MODELS + 2, 5), "two models too many, and three of five requests"


async def test_disabled() -> None:
    curves, _, _ = made(memory_bytes=0)
    with pytest.raises(InvalidRequest, match="--curve-memory above 0"):
        await curves.report()
    await curves.run()


async def test_memory_stays_within_its_setting() -> None:
    """Thousands of distinct blocks of several tenants, and every size in miniature."""
    bound = 8 << 20
    curves, _, _ = made(bound, blocks=3000, eviction="reuse")
    tracemalloc.start()
    try:
        for number in range(60):
            names = random.Random(number).randbytes(16 * 100)
            blocks = [BlockHash(names[16 * i : 16 * i + 16]) for i in range(100)]
            curves.add(EndedRequest(0.0, 100 * 64, 1, blocks, 64, model="tiny", tenant=f"t{number % 5}"))
        await curves.report()
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used < bound
