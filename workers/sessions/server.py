"""Sessions with conductors: requests come in by one stream each, a step's outputs leave in one message each.

Everything here runs on the process's event loop; the engine's thread is reached by commands and answers by reports.
A session that ends takes its requests along: nobody would read their tokens.

A step's outputs leave at once. A conductor that has none in it hears of the load and the KV events only every
``SPREAD_S``, of all that came meanwhile in one message: with many conductors each would otherwise read each step of
each worker, and more conductors could carry no more. Example: of eight conductors one has requests at a worker that
makes 100 steps a second: it gets 100 messages a second, each of the others 20.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import grpc.aio
import structlog

from tanghulu.errors import Overloaded, TanghuluError
from tanghulu.protos import session_pb2
from tanghulu.runtime.tasks import cancelled
from tanghulu.types import BlockHash, InstanceId, RequestId
from tanghulu.workers.engine.block_pool import KvEvent
from tanghulu.workers.engine.engine import EngineCore
from tanghulu.workers.engine.thread import EngineLoad, EngineThread, StepReport
from tanghulu.workers.sessions.wire import (
    RequestFactory,
    error_message,
    event_messages,
    load_message,
    output_message,
    welcome_message,
)

_log = structlog.get_logger(__name__)

#: A conductor that is this many steps behind does not read: its session ends, and it may open another.
MAX_UNREAD_STEPS = 4096
#: Between two messages to a conductor that has no output in them.
SPREAD_S = 0.05
#: KV events that wait for the next message at the most.
MAX_UNTOLD_EVENTS = 1024


@dataclass(eq=False)
class ConductorSession:
    """One conductor's stream. ``requests`` are those of its requests that are in the engine.

    ``events`` and ``load`` have not been told yet; ``telling`` will tell them, or ``next_s`` is the time from which on
    they may be told at once. ``load`` holds the first ``num_taken`` of the session's ``num_submits``. ``added`` has
    those that the engine took and no load held yet, each with how many requests of all sessions it had taken then.
    """

    conductor_id: str
    outbox: asyncio.Queue[session_pb2.FromWorker | None]
    requests: set[RequestId] = field(default_factory=set)
    events: list[session_pb2.KvEvent] = field(default_factory=list)
    load: session_pb2.Load | None = None
    telling: asyncio.TimerHandle | None = None
    next_s: float = 0.0
    num_submits: int = 0
    num_taken: int = 0
    added: deque[tuple[int, int]] = field(default_factory=deque)

    def heard(self, load: EngineLoad) -> None:
        """Count the submits that ``load``, of the engine, holds."""
        while self.added and self.added[0][0] <= load.num_added:
            self.num_taken = self.added.popleft()[1]


class SessionHub:
    """All sessions of a worker; performs Submit and Abort, spreads reports."""

    def __init__(
        self,
        instance_id: InstanceId,
        generation: int,
        factory: RequestFactory,
        engine: EngineThread,
        add_exports: Callable[[StepReport], dict[RequestId, session_pb2.KvSource]],
        release_export: Callable[[int], None],
    ) -> None:
        self._instance_id = instance_id
        self._generation = generation
        self._factory = factory
        self._engine = engine
        self._add_exports = add_exports
        self._release_export = release_export
        self._loop = asyncio.get_running_loop()
        self._sessions: set[ConductorSession] = set()
        self._owners: dict[RequestId, ConductorSession] = {}
        self._step = 0
        self._sequence = 0
        self._draining = False
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def num_requests(self) -> int:
        return len(self._owners)

    # --- the stream

    async def serve(self, requests: AsyncIterator[session_pb2.ToWorker]) -> AsyncIterator[session_pb2.FromWorker]:
        """Serve one session, from its hello to its end."""
        session = ConductorSession("", asyncio.Queue(MAX_UNREAD_STEPS))
        reading = asyncio.create_task(self._read(session, requests))
        try:
            while (message := await session.outbox.get()) is not None:
                yield message
        finally:
            await cancelled(reading)
            self._leave(session)

    async def _read(self, session: ConductorSession, requests: AsyncIterator[session_pb2.ToWorker]) -> None:
        try:
            async for message in requests:
                self._receive(session, message)
        except grpc.aio.UsageError:
            pass  # the call ended between two reads
        finally:
            self._end(session)

    def _receive(self, session: ConductorSession, message: session_pb2.ToWorker) -> None:
        match message.WhichOneof("message"):
            case "hello":
                session.conductor_id = message.hello.conductor_id
                self._engine.post(lambda core: self._snapshot(core, session))
            case "submit":
                self._submit(session, message.submit)
            case "abort":
                self._abort(RequestId(message.abort.request_id))
            case "release":
                self._release_export(message.release.export_id)

    def _submit(self, session: ConductorSession, submit: session_pb2.Submit) -> None:
        request_id = RequestId(submit.request_id)
        session.num_submits += 1
        number = session.num_submits
        if self._draining:
            self._refuse(session, request_id, Overloaded(f"worker {self._instance_id} is about to end"))
            return
        try:
            request = self._factory.request(submit)
        except TanghuluError as error:
            self._refuse(session, request_id, error)
            return
        previous = self._owners.get(request_id)
        if previous is not None:
            previous.requests.discard(request_id)
        self._owners[request_id] = session
        session.requests.add(request_id)
        self.idle.clear()

        def add(core: EngineCore) -> None:
            try:
                core.add(request)
                session.added.append((core.scheduler.num_added, number))
            except TanghuluError as error:
                self._loop.call_soon_threadsafe(self._refuse, session, request_id, error)

        self._engine.post(add)

    def _refuse(self, session: ConductorSession, request_id: RequestId, error: TanghuluError) -> None:
        self._forget(request_id)
        step = session_pb2.StepOutput(step=self._step, outputs=[error_message(request_id, error)])
        self._send(session, session_pb2.FromWorker(step=step))

    def _abort(self, request_id: RequestId) -> None:
        self._forget(request_id)
        self._engine.post(lambda core: core.abort(request_id))  # False: it has ended, its report is on its way

    def _forget(self, request_id: RequestId) -> None:
        owner = self._owners.pop(request_id, None)
        if owner is not None:
            owner.requests.discard(request_id)
        if not self._owners:
            self.idle.set()

    # --- from the engine

    def _snapshot(self, core: EngineCore, session: ConductorSession) -> None:
        """List the cached blocks, in the engine's thread: after all events reported so far, before all later ones."""
        hashes = core.scheduler.pool.matchable_hashes()
        load = self._engine.load()
        pending = core.scheduler.pool.take_events()
        self._loop.call_soon_threadsafe(self._welcome, session, hashes, load, pending)

    def _welcome(
        self, session: ConductorSession, hashes: list[BlockHash], load: EngineLoad, pending: list[KvEvent]
    ) -> None:
        if pending:  # events of commands before the snapshot: they belong in front of it
            self._broadcast_events(pending, load)
        session.events.clear()  # the snapshot holds them
        message = welcome_message(self._instance_id, self._generation, hashes, self._sequence, load)
        self._sessions.add(session)
        self._send(session, session_pb2.FromWorker(welcome=message))
        _log.info("session.opened", conductor=session.conductor_id, cached_blocks=len(hashes))

    def _broadcast_events(self, events: list[KvEvent], load: EngineLoad) -> None:
        messages, told = event_messages(events), load_message(load)
        self._sequence += len(messages)
        for session in list(self._sessions):
            session.heard(load)
            self._note(session, messages, told)

    def on_report(self, report: StepReport) -> None:
        """Spread a step's report: to each conductor its requests' outputs, to all the events and the load."""
        self._step += 1
        sources = self._add_exports(report)
        outputs: dict[ConductorSession, list[session_pb2.RequestOutput]] = {}
        for output in report.result.outputs:
            owner, source = self._owners.get(output.request_id), sources.get(output.request_id)
            if owner is not None:
                outputs.setdefault(owner, []).append(output_message(output, source))
            elif source is not None:
                self._release_export(source.export_id)  # its conductor is gone: nobody will fetch it
            if output.finish_reason is not None:
                self._forget(output.request_id)
        events, load = event_messages(report.result.kv_events), load_message(report.load)
        self._sequence += len(events)
        for session in list(self._sessions):
            session.heard(report.load)
            self._note(session, events, load, outputs.get(session, ()))

    def _note(
        self,
        session: ConductorSession,
        events: Sequence[session_pb2.KvEvent],
        load: session_pb2.Load,
        outputs: Sequence[session_pb2.RequestOutput] = (),
    ) -> None:
        """Tell ``session`` at once if it has ``outputs``, or was told nothing for a while; else soon."""
        session.events.extend(events)
        session.load = load
        now_s = self._loop.time()
        # Reads are told once, so that a later load must not take the place of one that has them.
        if outputs or load.reads or len(session.events) > MAX_UNTOLD_EVENTS or now_s >= session.next_s:
            self._tell(session, outputs)
        elif session.telling is None:
            session.telling = self._loop.call_at(session.next_s, self._tell, session)

    def _tell(self, session: ConductorSession, outputs: Sequence[session_pb2.RequestOutput] = ()) -> None:
        self._calm(session)
        session.next_s = self._loop.time() + SPREAD_S
        step = session_pb2.StepOutput(
            step=self._step,
            outputs=outputs,
            event_sequence=self._sequence - len(session.events),
            kv_events=session.events,
            load=session.load,
            submits_taken=session.num_taken,
        )
        session.events.clear()
        self._send(session, session_pb2.FromWorker(step=step))

    def _calm(self, session: ConductorSession) -> None:
        if session.telling is not None:
            session.telling.cancel()
            session.telling = None

    def _send(self, session: ConductorSession, message: session_pb2.FromWorker) -> None:
        try:
            session.outbox.put_nowait(message)
        except asyncio.QueueFull:
            _log.warning("session.too_slow", conductor=session.conductor_id, unread=MAX_UNREAD_STEPS)
            self._end(session)

    # --- ends

    def _end(self, session: ConductorSession) -> None:
        """Make the stream's writing side stop, whatever is still in the outbox."""
        self._sessions.discard(session)
        self._calm(session)
        while session.outbox.full():
            session.outbox.get_nowait()
        session.outbox.put_nowait(None)

    def _leave(self, session: ConductorSession) -> None:
        self._sessions.discard(session)
        for request_id in list(session.requests):
            self._abort(request_id)
        _log.info("session.closed", conductor=session.conductor_id)

    def drain(self) -> None:
        """Refuse new requests from now on, so that they go to other workers; those that are here go on."""
        self._draining = True

    def close(self) -> None:
        for session in list(self._sessions):
            self._end(session)
