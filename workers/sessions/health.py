"""Health of the engine: its heartbeat, and a request of one token sent through all of it and awaited.

The engine is requested to report at least every ``BEAT_S``, whether there is work or not; the report goes to every
conductor as a step does, and to the supervisor. A hanging engine, as in a call to a GPU that does not return, sends
neither, though the process answers calls. Only a token proves that an engine does not hang. Runs on the process's event
loop.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Final

from tanghulu.errors import DeadlineExceeded
from tanghulu.runtime.clock import Clock
from tanghulu.types import RequestId
from tanghulu.workers.engine.requests import EngineRequest
from tanghulu.workers.engine.thread import EngineThread, StepReport

BEAT_S: Final = 1.0


class EngineBeats:
    """Requests reports by ``beat``; ``alive`` is called about once a beat while there are any."""

    def __init__(self, beat: Callable[[], None], alive: Callable[[], None]) -> None:
        self._beat = beat
        self._alive = alive
        self._requested = False
        self._reported = False

    async def run(self) -> None:
        """Send requests until cancelled; one is open at a time."""
        while True:
            if not self._requested:
                self._requested = True
                self._beat()
            await asyncio.sleep(BEAT_S)
            if self._reported:
                self._reported = False
                self._alive()

    def on_report(self, report: StepReport) -> None:
        """Note a report of the engine."""
        self._requested, self._reported = False, True


#: Ahead of everything that waits: a full queue is no fault.
PRIORITY = (1 << 31) - 1


class EngineProbe:
    """Probes of one engine; ``make`` builds the request of a given name, ``on_report`` must receive every report."""

    def __init__(self, engine: EngineThread, make: Callable[[RequestId], EngineRequest], clock: Clock) -> None:
        self._engine = engine
        self._make = make
        self._clock = clock
        self._numbers = itertools.count(1)
        self._waiting: dict[RequestId, asyncio.Future[None]] = {}

    async def run(self, deadline_s: float) -> float:
        """Return the seconds until the token arrived; raises DeadlineExceeded, or the engine's refusal."""
        name, started_s = RequestId(f"probe-{next(self._numbers)}"), self._clock.now_s()
        request, done = self._make(name), asyncio.get_running_loop().create_future()
        self._waiting[name] = done
        try:
            async with asyncio.timeout(deadline_s):
                await self._engine.call(lambda core: core.add(request))
                await done
        except TimeoutError:
            self._engine.post(lambda core: core.abort(name))
            raise DeadlineExceeded(f"the engine computed no token within {deadline_s:g} s") from None
        finally:
            del self._waiting[name]
        return self._clock.now_s() - started_s

    def on_report(self, report: StepReport) -> None:
        """Look for probes among a step's outputs."""
        if not self._waiting:
            return
        for output in report.result.outputs:
            done = self._waiting.get(output.request_id)
            if done is not None and not done.done():
                done.set_result(None)
