"""The thread that steps the engine, and the only one that touches it.

Other threads post commands, which run between two steps, in order; after each step (or batch of commands that changed
something) one report is sent. The event loop of the process is never blocked by the model, nor the model by it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import structlog
from msgspec import Struct, structs

from tanghulu.errors import TanghuluError
from tanghulu.hashing import TokenSequence
from tanghulu.session.load import PeerRead, WorkerLoad
from tanghulu.session.outputs import KvSource
from tanghulu.session.speed import SpeedMeter
from tanghulu.types import BlockHash, RequestId
from tanghulu.workers.engine.block_pool import KvEvent
from tanghulu.workers.engine.engine import EngineCore
from tanghulu.workers.engine.exports import KvExport
from tanghulu.workers.engine.requests import EngineRequest
from tanghulu.workers.engine.step import StepResult

_log = structlog.get_logger(__name__)

#: Steps that share one load while requests merely continue.
MAX_STEPS_A_LOAD = 16
#: Longest wait of a command that wakes nobody.
MAX_REST_S = 0.5

Command = Callable[[EngineCore], object]
T = TypeVar("T")


class EngineLoad(Struct, frozen=True):
    """Load of the engine: ``shared`` with conductors, and figures of this worker alone.

    ``num_fetching`` requests are among those waiting; ``num_added`` have arrived so far.
    """

    shared: WorkerLoad = WorkerLoad()
    num_fetching: int = 0
    blocks_cached: int = 0
    blocks_in_use: int = 0
    blocks_in_transfer: int = 0
    num_added: int = 0


class StepReport(Struct, frozen=True):
    """Result of a step, the load, and the changed exports of requests."""

    result: StepResult
    load: EngineLoad
    exports: tuple[KvExport, ...] = ()


class EngineThread:
    """Runs ``core`` until ``stop``. ``on_report`` and ``on_failure`` are called in the engine's thread.

    ``in_turn`` has a function called in the event loop in its place among the reports, if these are not delivered there
    one by one by ``call_soon_threadsafe``.
    """

    def __init__(
        self,
        core: EngineCore,
        on_report: Callable[[StepReport], None],
        on_failure: Callable[[BaseException], None],
        speed: SpeedMeter | None = None,
        in_turn: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self.core = core
        self._in_turn = in_turn
        self._on_report = on_report
        self._on_failure = on_failure
        self._commands: deque[Command] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._speed = speed or SpeedMeter()
        self._load = EngineLoad()
        self._num_shared = MAX_STEPS_A_LOAD  # reports with that load
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to step."""
        self._thread.start()

    def post(self, command: Command) -> None:
        """Run ``command`` between two steps; any thread may call. It must not raise and must not wait."""
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def post_lazily(self, command: Command) -> None:
        """Run ``command``, which gives blocks back, before the next step without waking an idle thread; thread-safe.

        It wakes the thread only for requests waiting for blocks. Otherwise an idle thread runs it within
        ``MAX_REST_S``: waking for each release and each stored chunk would cost as much as the prefill of a short
        prompt.
        """
        with self._wake:
            self._commands.append(command)
            if self.core.scheduler.has_work:  # a sleeping thread waits for just that
                self._wake.notify()

    async def call(self, command: Callable[[EngineCore], T]) -> T:
        """Run ``command`` between two steps; return its result, or raise its typed error, in the event loop."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()

        def run(core: EngineCore) -> None:
            try:
                loop.call_soon_threadsafe(result.set_result, command(core))
            except TanghuluError as error:
                loop.call_soon_threadsafe(result.set_exception, error)

        self.post(run)
        return await asyncio.shield(result)

    def submit(
        self, request: EngineRequest, added: Callable[[int], None], refused: Callable[[TanghuluError], None]
    ) -> None:
        """Add ``request``; one of the two is called in the event loop, before the reports that result from it."""
        in_turn = self._in_turn or asyncio.get_running_loop().call_soon_threadsafe

        def add(core: EngineCore) -> None:
            try:
                core.add(request)
                in_turn(partial(added, core.scheduler.num_added))
            except TanghuluError as error:
                in_turn(partial(refused, error))

        self.post(add)

    def pull_ahead(self, name: RequestId, sequence: TokenSequence, peer: KvSource) -> None:
        """Begin to fetch a prompt that another worker computes."""
        self.post(lambda core: core.pull_ahead(name, sequence, peer))

    def abort(self, request_id: RequestId) -> None:
        """Abort a request; the report of one that has ended is on its way."""
        self.post(lambda core: core.abort(request_id))

    def snapshot(self, take: Callable[[Sequence[BlockHash], EngineLoad, Sequence[KvEvent]], None]) -> None:
        """List the cached blocks; ``take`` is called in the event loop, between the reports so far and later ones."""
        in_turn = self._in_turn or asyncio.get_running_loop().call_soon_threadsafe

        def look(core: EngineCore) -> None:
            hashes, events = core.pool.matchable_hashes(), core.pool.take_events()
            in_turn(partial(take, hashes, self.load(), events))

        self.post(look)

    def beat(self) -> None:
        """Request a report, whether there is work or not."""
        self.post(lambda core: None)

    def stop(self, timeout_s: float | None = None) -> bool:
        """End after the step under way, having run earlier commands. False if it has not ended in ``timeout_s``."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # for inspection of the process's threads
            Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("engine")
        try:
            while True:
                commands, stopping = self._take_commands()
                for command in commands:
                    command(self.core)
                if stopping:
                    return
                self._advance(commanded=bool(commands))
        except BaseException as error:  # noqa: BLE001 - the engine's state is unknown now: the process must end
            _log.exception("engine.failed")
            self._on_failure(error)

    def _take_commands(self) -> tuple[list[Command], bool]:
        """Return the commands for before the next step; sleeps while there is nothing to do at all."""
        if self._can_step and not self._commands and not self._stopping:
            return [], False
        with self._wake:
            while not (self._commands or self._stopping or self._can_step):
                self._wake.wait(MAX_REST_S)
            commands = list(self._commands)
            self._commands.clear()
            return commands, self._stopping

    _can_step = False

    def _advance(self, *, commanded: bool) -> None:
        scheduler = self.core.scheduler
        result = self.core.step() if scheduler.has_work else StepResult()
        self.core.rest()
        events = result.kv_events or tuple(self.core.pool.take_events())
        # A step may find all waiting requests blocked by transfers: only an event from outside changes that.
        self._can_step = scheduler.has_work and not result.idle
        if not result.idle:
            seconds = result.timings.forward_s + result.timings.sample_s
            num_tokens = result.num_computed_tokens - result.num_drafted_tokens
            self._speed.step(num_tokens, result.num_sequences, seconds, result.work)
        exports = scheduler.exports.take_changed()
        if commanded or events or exports or not result.idle:
            ended = any(output.finish is not None for output in result.outputs)
            goes_on = not (commanded or events or exports or ended or result.preempted or result.work.prefill_tokens)
            load = self._load_after(goes_on=goes_on)
            if events and not result.kv_events:
                result = structs.replace(result, kv_events=events)
            self._on_report(StepReport(result, load, exports))

    def _load_after(self, *, goes_on: bool) -> EngineLoad:
        """Return the load after a step; pure decode steps (``goes_on``) change it little and share one."""
        self._num_shared += 1
        if not goes_on or self._num_shared >= MAX_STEPS_A_LOAD:
            self._load = self.load(self._speed.take_reads())
            # Reads from peers arrive as commands, once.
            self._num_shared = MAX_STEPS_A_LOAD if self._load.shared.reads else 0
        return self._load

    def load(self, reads: tuple[PeerRead, ...] = ()) -> EngineLoad:
        """Return the engine's load now; called in the engine's thread (by a command); with ``reads`` from peers."""
        scheduler, pool = self.core.scheduler, self.core.pool
        pending_tokens, pending_pairs = scheduler.pending
        shared = structs.replace(
            self._speed.speeds,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + scheduler.num_fetching,
            blocks_total=pool.num_blocks,
            blocks_free=pool.num_available,
            prefill_tokens_waiting=pending_tokens,
            prefill_pairs_waiting=pending_pairs,
            max_num_seqs=scheduler.config.max_num_seqs,
            reads=reads,
        )
        return EngineLoad(
            shared, scheduler.num_fetching, pool.num_cached, pool.num_in_use, pool.num_in_transfer, scheduler.num_added
        )
