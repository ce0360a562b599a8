"""Stalls of the event loop: ``tanghulu_loop_stall_seconds``, and a log line for each long one.

A timer due every PERIOD_S fires late if a step of the loop took longer, or if the process got no CPU; both delay
everybody who waits for an answer. Only delays over LEAST_S count as stalls. A thread watches meanwhile, and if a stall
is longer than LOGGED_S it notes what the loop is executing. A step inside C that holds the interpreter is noted when
it ends, by the line that called it.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from types import FrameType
from typing import Self

import structlog
from prometheus_client import CollectorRegistry, Histogram

from tanghulu.runtime.telemetry import RareLog

_log = structlog.get_logger(__name__)

METRIC = "tanghulu_loop_stall_seconds"
PERIOD_S = 0.02
#: A timer later than this counts as a stall.
LEAST_S = 0.01
#: A stall of this length has a line in the log, but at most one line in PAUSE_S.
LOGGED_S, PAUSE_S = 0.25, 10.0
_BUCKETS = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_NUM_FRAMES = 6


class LoopWatch:
    """Watches the running loop inside its block, and publishes its stalls in ``registry``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._histogram = Histogram(
            METRIC, "how long the event loop stood still, each time", buckets=_BUCKETS, registry=registry
        )
        self._rare_log = RareLog(_log, PAUSE_S)
        self._due_s = float("inf")
        self._timer: asyncio.TimerHandle | None = None
        self._loop_thread = 0
        self._seen: tuple[float, str] | None = None  # when the timer was due, and what ran instead
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="tanghulu-stalls", daemon=True)

    def __enter__(self) -> Self:
        self._loop_thread = threading.get_ident()
        self._set_timer()
        self._watcher.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._ended.set()
        self._watcher.join()

    def _set_timer(self) -> None:
        self._due_s = time.monotonic() + PERIOD_S
        self._timer = asyncio.get_running_loop().call_later(PERIOD_S, self._tick)

    def _tick(self) -> None:
        now_s, due_s = time.monotonic(), self._due_s
        stall_s = now_s - due_s
        if stall_s > LEAST_S:
            self._histogram.observe(stall_s)
        if stall_s >= LOGGED_S:
            seen = self._seen
            at = seen[1] if seen is not None and seen[0] == due_s else ""
            self._rare_log.warning("loop.stalled", seconds=round(stall_s, 3), at=at)
        self._set_timer()

    def _watch(self) -> None:
        """Note, in the thread, what the loop is executing when its timer is late."""
        while not self._ended.wait(LOGGED_S / 2):
            due_s = self._due_s
            is_noted = self._seen is not None and self._seen[0] == due_s
            if time.monotonic() - due_s > LOGGED_S / 2 and not is_noted:
                frame = sys._current_frames().get(self._loop_thread)
                self._seen = due_s, _place_of(frame)


def _place_of(frame: FrameType | None) -> str:
    """Return the innermost functions of a stack, the innermost first: ``file:line function < file:line function``."""
    places: list[str] = []
    while frame is not None and len(places) < _NUM_FRAMES:
        code = frame.f_code
        places.append(f"{'/'.join(code.co_filename.split('/')[-3:])}:{frame.f_lineno} {code.co_qualname}")
        frame = frame.f_back
    return " < ".join(places)
