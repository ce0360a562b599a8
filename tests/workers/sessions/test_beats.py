"""The heartbeat goes through the engine: one that stands still is asked once, and says nothing."""

from __future__ import annotations

import asyncio
import contextlib

from tanghulu.workers.engine.step import StepResult
from tanghulu.workers.engine.thread import EngineLoad, StepReport
from tanghulu.workers.sessions import health
from tanghulu.workers.sessions.health import EngineBeats

REPORT = StepReport(StepResult(), EngineLoad())


class _Engine:
    def __init__(self) -> None:
        self.asked = 0
        self.hangs = False

    def beat(self) -> None:
        self.asked += 1
        if not self.hangs:
            asyncio.get_running_loop().call_soon(self.beats.on_report, REPORT)


async def test_it_beats_while_the_engine_answers(monkeypatch):
    monkeypatch.setattr(health, "BEAT_S", 0.001)
    engine, alive = _Engine(), list[int]()
    engine.beats = EngineBeats(engine.beat, lambda: alive.append(1))
    running = asyncio.create_task(engine.beats.run())

    async def until(condition) -> None:
        async with asyncio.timeout(30):
            while not condition():  # noqa: ASYNC110 - it has no hook for tests
                await asyncio.sleep(0.001)

    try:
        await until(lambda: len(alive) > 5)
        engine.hangs = True
        await until(lambda: engine.beats._requested and not engine.beats._reported)
        asked, said = engine.asked, len(alive)
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert (engine.asked, len(alive)) == (asked, said), "it is asked once, and nobody says that it lives"
        engine.hangs = False
        engine.beats.on_report(REPORT)
        await until(lambda: len(alive) > said + 5)
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
