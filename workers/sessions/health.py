"""Health of the engine: its heartbeat, and the computation of a step, awaited on request.

The engine is requested to report at least every ``BEAT_S``, whether there is work or not; the report goes to every
conductor as a step does, and to the supervisor. A hanging engine, as in a call to a GPU that does not return, sends
neither, though the process answers calls. Only a computed step proves that an engine does not hang. Runs on the
process's event loop.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Final

from tanghulu.errors import DeadlineExceeded, Overloaded, TanghuluError
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


#: Among moved requests, ahead of everything that waits.
PRIORITY = (1 << 31) - 1


class EngineProbe:
    """Probes of one engine; ``make`` builds the request of a given name, ``on_report`` must receive every report.

    Any step that computes answers a probe; its request of one token is for an engine with nothing else to compute.
    """

    def __init__(self, engine: EngineThread, make: Callable[[RequestId], EngineRequest], clock: Clock) -> None:
        self._engine = engine
        self._make = make
        self._clock = clock
        self._numbers = itertools.count(1)
        self._waiting: list[asyncio.Future[None]] = []

    async def run(self, deadline_s: float) -> float:
        """Return the seconds until a step was computed; raises DeadlineExceeded, or the engine's refusal."""
        name, started_s = RequestId(f"probe-{next(self._numbers)}"), self._clock.now_s()
        request, done = self._make(name), asyncio.get_running_loop().create_future()

        def refused(error: TanghuluError) -> None:
            if isinstance(error, Overloaded):  # the steps of those that wait answer
                self._waiting.append(done)
            elif not done.done():
                done.set_exception(error)

        self._engine.submit(request, lambda _: self._waiting.append(done), refused)
        try:
            async with asyncio.timeout(deadline_s):
                await done
        except TimeoutError:
            raise DeadlineExceeded(f"the engine computed no step within {deadline_s:g} s") from None
        finally:
            self._engine.post(lambda core: core.abort(name))
        return self._clock.now_s() - started_s

    def on_report(self, report: StepReport) -> None:
        """Answer all probes if a step was computed: it began after their requests had reached the engine."""
        if report.result.idle:
            return
        for done in self._waiting:
            if not done.done():
                done.set_result(None)
        self._waiting.clear()
