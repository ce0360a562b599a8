"""The engine's reports on their way from its thread to the event loop: one wake-up for all waiting ones.

Waking the loop costs a system call and a switch of threads; a busy loop takes all reports of its last turn together.
Calls that need a place among them, such as the blocks cached between two steps, go the same way (``call``).

The engine may be ``MAX_WAITING`` steps ahead of the loop, then it waits: an engine with short steps would otherwise
keep the interpreter to itself, and each request's tokens, submission and KV would wait behind all steps.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Final

from tanghulu.workers.engine.thread import StepReport

#: Most reports not yet taken by the loop; long steps never reach it.
MAX_WAITING: Final = 32


class EngineReports:
    """``put`` is called by the engine's thread, ``spread`` in the event loop, with waiting reports, in order.

    Example: if a report, a call and two reports wait together, ``spread`` gets the first, then the call is made, then
    ``spread`` gets the other two.
    """

    def __init__(self, spread: Callable[[Sequence[StepReport]], None]) -> None:
        self._spread = spread
        self._loop = asyncio.get_running_loop()
        self._changed = threading.Condition()
        self._waiting: list[StepReport | Callable[[], None]] = []
        self._closed = False

    def put(self, report: StepReport) -> None:
        with self._changed:
            while len(self._waiting) >= MAX_WAITING and not self._closed:
                self._changed.wait()
            self._add(report)

    def call(self, function: Callable[[], None]) -> None:
        """Have ``function`` called in the event loop, behind the reports so far and before later ones."""
        with self._changed:
            self._add(function)

    def _add(self, item: StepReport | Callable[[], None]) -> None:
        self._waiting.append(item)
        if len(self._waiting) == 1:
            self._loop.call_soon_threadsafe(self._take)

    def close(self) -> None:
        """Stop holding up the engine."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _take(self) -> None:
        with self._changed:
            waiting, self._waiting = self._waiting, []
            self._changed.notify()
        reports: list[StepReport] = []
        for item in waiting:
            if isinstance(item, StepReport):
                reports.append(item)
                continue
            if reports:
                self._spread(reports)
                reports = []
            item()
        if reports:
            self._spread(reports)
