"""Reports between the engine's thread and the loop: in order, few wake-ups, and the engine is held up only so long."""

from __future__ import annotations

import asyncio
import threading
import time

from tanghulu.workers.engine.step import StepResult
from tanghulu.workers.engine.thread import EngineLoad, StepReport
from tanghulu.workers.sessions.reports import MAX_WAITING, EngineReports


def _report(number: int) -> StepReport:
    return StepReport(StepResult(), EngineLoad(num_added=number))


async def test_reports_come_in_order_and_an_engine_that_is_ahead_waits():
    heard: list[int] = []
    queue = EngineReports(lambda reports: heard.extend(report.load.num_added for report in reports))
    engine = threading.Thread(target=lambda: [queue.put(_report(n)) for n in range(3 * MAX_WAITING)])
    engine.start()
    while len(queue._waiting) < MAX_WAITING:  # the loop stands still meanwhile
        time.sleep(0.001)  # noqa: ASYNC251
    assert engine.is_alive()
    assert len(queue._waiting) == MAX_WAITING
    async with asyncio.timeout(30):
        while len(heard) < 3 * MAX_WAITING:  # noqa: ASYNC110 - it has no hook for tests
            await asyncio.sleep(0)
    engine.join()
    assert heard == list(range(3 * MAX_WAITING))


async def test_a_closed_queue_holds_nobody_up():
    queue = EngineReports(lambda reports: None)
    engine = threading.Thread(target=lambda: [queue.put(_report(n)) for n in range(2 * MAX_WAITING)])
    engine.start()
    queue.close()
    engine.join(30)
    assert not engine.is_alive()


async def test_a_call_has_its_place_among_the_reports():
    heard: list[int] = []
    queue = EngineReports(lambda reports: heard.extend(report.load.num_added for report in reports))
    queue.put(_report(1))
    queue.call(lambda: heard.append(2))
    queue.call(lambda: heard.append(3))
    queue.put(_report(4))
    queue.put(_report(5))
    queue.call(lambda: heard.append(6))
    async with asyncio.timeout(30):
        while len(heard) < 6:  # noqa: ASYNC110 - it has no hook for tests
            await asyncio.sleep(0)
    assert heard == [1, 2, 3, 4, 5, 6]
