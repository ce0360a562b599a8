"""Sessions with conductors: requests come in by one stream each, a step's outputs leave in one message each.

Everything here runs on the process's event loop; the engine's thread is reached by commands and answers by reports.
A session that ends takes its requests along: nobody would read their tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import grpc.aio
import structlog

from tanghulu.errors import NodeUnavailable, TanghuluError
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


@dataclass(eq=False)
class ConductorSession:
    """One conductor's stream. ``requests`` are those of its requests that are in the engine."""

    conductor_id: str
    outbox: asyncio.Queue[session_pb2.FromWorker | None]
    requests: set[RequestId] = field(default_factory=set)


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
        if self._draining:
            self._refuse(session, request_id, NodeUnavailable(f"worker {self._instance_id} is about to end"))
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
        message = welcome_message(self._instance_id, self._generation, hashes, self._sequence, load)
        self._sessions.add(session)
        self._send(session, session_pb2.FromWorker(welcome=message))
        _log.info("session.opened", conductor=session.conductor_id, cached_blocks=len(hashes))

    def _broadcast_events(self, events: list[KvEvent], load: EngineLoad) -> None:
        messages = event_messages(events)
        for other in self._sessions:
            step = session_pb2.StepOutput(
                step=self._step, event_sequence=self._sequence, kv_events=messages, load=load_message(load)
            )
            self._send(other, session_pb2.FromWorker(step=step))
        self._sequence += len(messages)

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
        for session in list(self._sessions):
            step = session_pb2.StepOutput(
                step=self._step,
                outputs=outputs.get(session, ()),
                event_sequence=self._sequence,
                kv_events=events,
                load=load,
            )
            self._send(session, session_pb2.FromWorker(step=step))
        self._sequence += len(events)

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
