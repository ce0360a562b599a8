"""Heartbeat of the engine: a report at least every ``BEAT_S``, whether there is work or not.

The engine is requested to report even if nothing happened; the report goes to every conductor as a step does, and to
the supervisor. A hanging engine, as in a call to a GPU that does not return, sends neither, though the process answers
calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from tanghulu.workers.engine.thread import StepReport
from tanghulu.workers.sessions.port import Beating

BEAT_S: Final = 1.0


class EngineBeats:
    """Requests signs of life from the engine; ``alive`` is called about once a beat while there are any."""

    def __init__(self, engine: Beating, alive: Callable[[], None]) -> None:
        self._engine = engine
        self._alive = alive
        self._requested = False
        self._reported = False

    async def run(self) -> None:
        """Send requests until cancelled; one is open at a time."""
        while True:
            if not self._requested:
                self._requested = True
                self._engine.beat()
            await asyncio.sleep(BEAT_S)
            if self._reported:
                self._reported = False
                self._alive()

    def on_report(self, report: StepReport) -> None:
        """Note a report of the engine."""
        self._requested, self._reported = False, True
