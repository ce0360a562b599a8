"""A loop that stands still is seen, and what it did."""

from __future__ import annotations

import asyncio
import time

from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from tanghulu.runtime.stalls import LOGGED_S, METRIC, PAUSE_S, LoopWatch, StallLines


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


def test_lines_are_few_and_say_how_many_are_missing() -> None:
    lines = StallLines()
    assert lines.take(LOGGED_S / 2, 0.0) is None
    assert lines.take(LOGGED_S, 0.0) == 0
    assert lines.take(3.0, 1.0) is None
    assert lines.take(3.0, PAUSE_S - 1) is None
    assert lines.take(LOGGED_S, PAUSE_S) == 2
    assert lines.take(LOGGED_S, 2 * PAUSE_S) == 0
