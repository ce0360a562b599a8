"""A worker's start: the master is looked for first, and waited for if it goes away meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from tanghulu.discovery import entering
from tanghulu.discovery import master as master_discovery
from tanghulu.errors import MasterUnavailable
from tanghulu.masters import Masters
from tanghulu.runtime.process import Process, StoppedEarly, SupervisorLine
from tanghulu.types import Address, Role
from tanghulu.workers import main
from tanghulu.workers.config import WorkerConfig
from tests.free_ports import free_port
from tests.store.master.running_master import InProcess, MasterProcess


@pytest.fixture
async def master(tmp_path: Path) -> AsyncIterator[MasterProcess]:
    process = MasterProcess(tmp_path / "m")
    try:
        yield process
    finally:
        await process.close()


def _worker(folder: Path, master: Address) -> tuple[InProcess, WorkerConfig]:
    folder.mkdir()
    config = WorkerConfig(engine="mock", model="mock", port=0, kv_memory=4 << 20, master=Masters.of(master))
    line = SupervisorLine(-1, lambda: None)
    process = InProcess(Role.BOTH, config, folder, line, CollectorRegistry(), "127.0.0.1:1", 7)
    process.address = asyncio.get_running_loop().create_future()
    return process, config


async def test_a_master_that_goes_away_while_the_model_loads_is_waited_for(
    master: MasterProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(master_discovery, "REGISTER_DEADLINE_S", 0.2)
    await master.start()
    process, config = _worker(tmp_path / "w", master.address)
    loop, load = asyncio.get_running_loop(), main._load

    def load_meanwhile(process: Process, config: WorkerConfig) -> Any:
        asyncio.run_coroutine_threadsafe(master.kill(), loop).result()
        return load(process, config)

    monkeypatch.setattr(main, "_load", load_meanwhile)
    with capture_logs() as logs:
        serving = asyncio.create_task(main.serve(process, config))
        while not any(line["event"] == "discovery.waiting" for line in logs):
            assert not serving.done(), serving.result()
            await asyncio.sleep(0.01)
        await master.start()
        await process.address
        process.stopping.set()
        await serving
    told = [(line["event"], line["to"]) for line in logs if line["event"].startswith("discovery.") and "to" in line]
    assert told == [("discovery.waiting", "register"), ("discovery.found", "register")]


async def test_at_a_wrong_address_no_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entering, "MEET_S", 0.0)
    monkeypatch.setattr(main, "_load", None)
    process, config = _worker(tmp_path / "w", Address("127.0.0.1", free_port()))
    with pytest.raises(MasterUnavailable, match="is it running, and is this its address"):
        await main.serve(process, config)


async def test_one_that_is_told_to_stop_while_it_looks_stops(tmp_path: Path) -> None:
    process, config = _worker(tmp_path / "w", Address("127.0.0.1", free_port()))
    process.stopping.set()
    with pytest.raises(StoppedEarly):
        await main.serve(process, config)
