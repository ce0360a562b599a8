"""A worker that is told to end while vLLM is starting does not wait for it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tanghulu.engines.vllm_worker import server as module
from tanghulu.engines.vllm_worker.config import VllmWorkerConfig
from tanghulu.engines.vllm_worker.server import VllmWorkerServer
from tanghulu.errors import ConfigError, NodeUnavailable


@pytest.fixture
def process() -> Any:
    return SimpleNamespace(stopping=asyncio.Event(), instance_id=lambda port: f"worker-{port}")


@pytest.fixture
def worker(process: Any, tmp_path: Path) -> VllmWorkerServer:
    (tmp_path / "config.json").write_text("{}")
    return VllmWorkerServer(process, VllmWorkerConfig(model=str(tmp_path)))


async def test_a_start_that_is_broken_off(worker, process, monkeypatch):
    tries, ended = list[int](), asyncio.Event()

    def break_off() -> None:
        tries.append(1)
        if len(tries) == 2:  # at first there is no process yet
            ended.set()

    async def start() -> Any:
        await ended.wait()
        raise RuntimeError("vLLM's process has ended")

    monkeypatch.setattr(module, "BREAK_OFF_S", 0.001)
    monkeypatch.setattr(module.LoadedVllm, "break_off", break_off)
    process.stopping.set()
    with pytest.raises(NodeUnavailable, match="stopped before"):
        await worker._loaded(start())
    assert len(tries) == 2


async def test_a_start_that_fails_by_itself_says_why(worker):
    async def start() -> Any:
        raise ConfigError("no such argument")

    with pytest.raises(ConfigError, match="no such argument"):
        await worker._loaded(start())


async def test_a_start_that_ends_well(worker):
    loaded = object()

    async def start() -> Any:
        return loaded

    assert await worker._loaded(start()) is loaded
