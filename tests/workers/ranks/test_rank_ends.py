"""A rank's process that ends takes the worker with it; at the worker's end the ranks outlive all that uses them."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from tanghulu.masters import Masters
from tanghulu.runtime.process import Process, SupervisorLine
from tanghulu.types import Role
from tanghulu.workers import assembly, main
from tanghulu.workers.compute.device import CPU
from tanghulu.workers.compute.linear import Arithmetic
from tanghulu.workers.config import WorkerConfig
from tanghulu.workers.engine.kv_layout import KvLayout
from tanghulu.workers.kv.connector import KvConnector
from tanghulu.workers.ranks.processes import RankProcesses, RankTask
from tests.store.master.running_master import InProcess, MasterProcess
from tests.workers.ranks.test_tensor_parallel import sharded
from tests.workers.tiny import BLOCK, TinyModel, request

#: Reads what the worker sends until it closes the connection, as a rank does.
READER = f"""#!{sys.executable} -S
import os, sys
while os.read(int(sys.argv[-1]), 65536):
    pass
"""


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RankProcesses:
    """Three processes in the place of ranks."""
    program = tmp_path / "rank"
    program.write_text(READER)
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    layout = KvLayout(1, BLOCK, 1, 4, "float32", 4)
    return RankProcesses(RankTask("", layout, torch.float32, Arithmetic.of(torch.float32), 1, CPU))


def test_the_end_of_a_rank_is_reported_with_its_status(ranks: RankProcesses):
    ended: queue.Queue[Exception] = queue.Queue()
    ranks.watch(ended.put)
    os.kill(ranks._processes[1].pid, signal.SIGKILL)
    assert str(ended.get(timeout=60)) == "tensor-parallel rank 2 of 4 ended with status -9"
    ranks.close()
    assert ended.empty(), "ranks that are closed have not failed"


def test_a_rank_that_ended_before_is_reported_too(ranks: RankProcesses):
    ended: queue.Queue[Exception] = queue.Queue()
    ranks._processes[0].kill()
    ranks._processes[0].wait()
    ranks.watch(ended.put)
    assert "rank 1 of 4" in str(ended.get(timeout=60))
    ranks.close()


class _Ranks:
    """Notes when it is closed, and keeps what a watcher would call."""

    def __init__(self, order: list[str]) -> None:
        self._order = order
        self.on_end: Callable[[Exception], None] | None = None

    def watch(self, on_end: Callable[[Exception], None]) -> None:
        self.on_end = on_end

    def map_cache(self, fd: int) -> None:
        assert fd >= 0

    def close(self) -> None:
        self._order.append("ranks")


async def test_a_worker_ends_with_a_rank_and_closes_ranks_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    order: list[str] = []
    ranks, close, load = _Ranks(order), KvConnector.close, main._load

    def closed(connector: KvConnector) -> None:
        close(connector)
        order.append("connector")

    def load_with_ranks(process: Process, config: WorkerConfig) -> Any:
        return replace(load(process, config), ranks=ranks)

    monkeypatch.setattr(KvConnector, "close", closed)
    monkeypatch.setattr(main, "_load", load_with_ranks)
    master = MasterProcess(tmp_path / "m")
    await master.start()
    (tmp_path / "w").mkdir()
    config = WorkerConfig(engine="mock", model="mock", port=0, kv_memory=4 << 20, master=Masters.of(master.address))
    process = InProcess(
        Role.BOTH, config, tmp_path / "w", SupervisorLine(-1, lambda: None), CollectorRegistry(), "127.0.0.1:1", 7
    )
    process.address = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(main.serve(process, config))
    await process.address
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(assembly, "os", SimpleNamespace(getpid=os.getpid, kill=lambda *call: killed.append(call)))
    assert ranks.on_end is not None
    ranks.on_end(ChildProcessError("tensor-parallel rank 1 of 2 ended with status -9"))
    assert killed == [(os.getpid(), signal.SIGKILL)]
    process.stopping.set()
    await serving
    await master.close()
    assert order == ["connector", "ranks"]


@pytest.mark.slow
def test_a_real_rank_that_dies_is_reported_while_the_others_compute(tiny: TinyModel):
    with sharded(str(tiny.path), 2, BLOCK) as core:
        ranks: RankProcesses = core.runner._announce.__self__  # type: ignore[attr-defined]
        ended: queue.Queue[Exception] = queue.Queue()
        ranks.watch(ended.put)
        core.add(request("one", range(2, 30), 8))
        core.step()
        os.kill(ranks._processes[0].pid, signal.SIGKILL)
        assert "rank 1 of 2 ended with status -9" in str(ended.get(timeout=60))
