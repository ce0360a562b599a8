"""A loop that stands still is seen, and what it did."""

from __future__ import annotations

import asyncio
import time

from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from tanghulu.runtime.stalls import LOGGED_S, METRIC, PAUSE_S, LoopWatch


def _stand_still(seconds: float) -> None:
    time.sleep(seconds)


async def test_a_stall_is_counted_and_its_line_names_what_ran() -> None:
    registry = CollectorRegistry()
    with capture_logs() as logs, LoopWatch(registry):
        _stand_still(3 * LOGGED_S)
        while not any(each["event"] == "loop.stalled" and "_stand_still" in each["at"] for each in logs):
            await asyncio.sleep(0.01)
            if not registry.get_sample_value(f"{METRIC}_count"):
                continue
            _stand_still(3 * LOGGED_S)  # the thread was not there in time, or the line was spent on another
            await asyncio.sleep(PAUSE_S / 100)
    total_s = registry.get_sample_value(f"{METRIC}_sum")
    assert total_s is not None
    assert total_s > LOGGED_S


async def test_lines_are_few() -> None:
    with capture_logs() as logs, LoopWatch(CollectorRegistry()):
        for _ in range(2):
            _stand_still(2 * LOGGED_S)
            await asyncio.sleep(0.01)
    assert [each["event"] for each in logs] == ["loop.stalled"]
