"""A step of the engine says that it computes; a hung engine and a refusing one say so in time."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest

from tanghulu.errors import ContextLengthExceeded, DeadlineExceeded
from tanghulu.runtime.clock import SystemClock
from tanghulu.workers.sessions.health import EngineProbe
from tests.workers.rig import Rig
from tests.workers.tiny import request


@pytest.fixture
def rig(tiny_model):
    made = Rig(tiny_model, None)
    yield made
    made.close()


def _probe(rig: Rig, length: int = 1) -> EngineProbe:
    probe = EngineProbe(rig.thread, lambda name: request(name, [3] * length, 1), SystemClock())

    def report(step) -> None:
        loop.call_soon_threadsafe(probe.on_report, step)

    loop = asyncio.get_running_loop()
    rig.thread._on_report = report
    return probe


async def test_a_token_comes(rig):
    assert 0 < await _probe(rig).run(10.0) < 10.0
    assert not rig.core.scheduler.has_work


async def test_a_hung_engine_is_told_from_a_slow_one(rig):
    probe, hang = _probe(rig), threading.Event()
    rig.thread.post(lambda _: hang.wait(20) and None)
    with pytest.raises(DeadlineExceeded, match="no step"):
        await probe.run(0.05)
    hang.set()
    assert await probe.run(10.0) > 0


@pytest.mark.parametrize("bounds", [{}, {"max_num_waiting": 1}, {"max_num_batched_tokens": 1}])
async def test_an_engine_that_is_full_is_well(rig, bounds):
    """Its batch, its queue, or its steps by a long prompt."""
    rig.thread.stop()  # every step is taken here
    core, probe = rig.core, _probe(rig)
    core.scheduler.config = replace(core.config, max_num_seqs=1, **bounds)
    core.add(request("running", [3] * 50, 50))
    _step(rig)
    core.add(request("waiting", [3], 50))
    asked = asyncio.create_task(probe.run(1.0))
    await asyncio.sleep(0)
    for _ in range(3):
        _step(rig)
    assert await asked >= 0
    _step(rig)
    assert core.scheduler.num_waiting == 1, "the probe is gone"


def _step(rig: Rig) -> None:
    commands, _ = rig.thread._take_commands()
    for command in commands:
        command(rig.core)
    rig.thread._advance(commanded=bool(commands))


async def test_a_refusal_is_passed_on(rig):
    with pytest.raises(ContextLengthExceeded):
        await _probe(rig, length=10_000).run(10.0)
