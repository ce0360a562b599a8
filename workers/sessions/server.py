"""Sessions with conductors: requests arrive by a fast-lane stream each, outputs leave through a `SessionOutbox`.

A session writes while its conductor reads; outputs meanwhile wait in its `SessionOutbox` for one message. Everything
here runs on the process's event loop. The computing engine, with its thread or process, is behind ``SessionEngine``,
which takes requests and answers by reports. A session's end also ends its requests: nobody would read their tokens.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import structlog

from tanghulu.errors import InvalidRequest, Overloaded, TanghuluError
from tanghulu.hashing import TokenSequence
from tanghulu.rpc.fast_server import NO_ANSWER, AnswerStream, FastService, Later, Peer
from tanghulu.rpc.methods import require_version
from tanghulu.session.load import PeerRead
from tanghulu.session.messages import (
    SESSION,
    Abort,
    FromWorker,
    PullAhead,
    ReleaseExport,
    SessionHello,
    SessionWelcome,
    StepOutput,
    Submit,
    ToWorker,
)
from tanghulu.session.outputs import KvSource, Output, PromptScores
from tanghulu.types import BlockHash, InstanceId, RequestId
from tanghulu.workers.engine.block_pool import KvEvent
from tanghulu.workers.engine.exports import KvExport
from tanghulu.workers.engine.step import PromptScoreArrays
from tanghulu.workers.engine.thread import EngineLoad, StepReport
from tanghulu.workers.sessions.outbox import SessionOutbox
from tanghulu.workers.sessions.wire import event_messages, score_messages, welcome_message

_log = structlog.get_logger(__name__)

#: Steps by which a conductor may fall behind before it counts as not reading: its session ends, and it may open
#: another.
MAX_UNREAD_STEPS = 4096


RequestT = TypeVar("RequestT")
RequestIn = TypeVar("RequestIn", contravariant=True)
RequestOut = TypeVar("RequestOut", covariant=True)
#: The cached blocks, the load, and unreported events that the blocks already contain.
TakesSnapshot = Callable[[Sequence[BlockHash], EngineLoad, Sequence[KvEvent]], None]


class SessionEngine(Protocol[RequestIn]):
    """An engine to which sessions give requests: ``EngineThread`` is ours, ``VllmEngine`` is vLLM's.

    All is called in the process's event loop, as are the functions passed in, in one order with the reports: the
    content of a snapshot was reported before it, and nothing reported after it is in it.
    """

    def submit(
        self, request: RequestIn, added: Callable[[int], None], refused: Callable[[TanghuluError], None]
    ) -> None:
        """Begin; then call ``added`` with the number of requests taken by the engine, or ``refused``."""

    def pull_ahead(self, name: RequestId, sequence: TokenSequence, peer: KvSource) -> None:
        """Begin to fetch the KV of a prompt that another worker computes; ``abort`` of ``name`` ends that."""

    def abort(self, request_id: RequestId) -> None:
        """End a request or a fetch, which may have ended already."""

    def snapshot(self, take: TakesSnapshot) -> None:
        """Give ``take`` the blocks that a prompt would find."""


class MakesRequests(Protocol[RequestOut]):
    """Makes an engine's requests from messages."""

    def compiling(self, submit: Submit) -> Future[Any] | None:
        """Begin what ``request`` would take long for, in a thread; None if it takes no time."""

    def request(self, submit: Submit) -> RequestOut:
        """Return the request described by ``submit``; raises InvalidRequest if it is not valid."""

    def pulled(self, pull: PullAhead) -> tuple[TokenSequence, KvSource]:
        """Return the prompt named by ``pull``, and where its KV is computed; raises InvalidRequest if impossible."""


@dataclass(eq=False)
class ConductorSession:
    """One conductor's stream. ``requests`` are those of its requests in the engine.

    Pending output: the ``welcome``, ``scores`` of prompts, each piece in a message of its own and before the tokens
    behind it, the outbox if it ``is_due``, or the stream's end. ``flush_timer`` will make it due; ``will_write``: it is
    written in the next step of the loop.
    """

    stream: AnswerStream
    conductor_id: str = ""
    requests: set[RequestId] = field(default_factory=set)
    outbox: SessionOutbox = field(default_factory=SessionOutbox)
    welcome: SessionWelcome | None = None
    scores: deque[PromptScores] = field(default_factory=deque)
    flush_timer: asyncio.TimerHandle | None = None
    is_due: bool = False
    will_write: bool = False
    ended: bool = False


class SessionHub(Generic[RequestT]):
    """All sessions of a worker; performs Submit and Abort, spreads reports."""

    def __init__(
        self,
        instance_id: InstanceId,
        generation: int,
        factory: MakesRequests[RequestT],
        engine: SessionEngine[RequestT],
        add_exports: Callable[[Sequence[KvExport]], dict[RequestId, KvSource]],
        release_export: Callable[[int], None],
        publish: Callable[[Sequence[KvEvent]], None] = lambda events: None,
    ) -> None:
        self._instance_id = instance_id
        self._generation = generation
        self._factory = factory
        self._engine = engine
        self._add_exports = add_exports
        self._release_export = release_export
        self._publish = publish
        self._loop = asyncio.get_running_loop()
        self._open: dict[Peer, ConductorSession] = {}
        self._sessions: set[ConductorSession] = set()  # the welcomed ones
        self._owners: dict[RequestId, ConductorSession] = {}
        self._sequence = 0
        self._draining = False
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def num_requests(self) -> int:
        return len(self._owners)

    # --- the stream

    def serve(self, service: FastService) -> None:
        """Answer conductors that connect to ``service``."""
        service.register(SESSION, self.receive)

    def receive(self, peer: Peer, message: ToWorker, _: memoryview) -> AnswerStream | Later:
        """Take a message of a conductor; its first, a hello, begins its session, which lasts as long as ``peer`` does.

        Raises InvalidRequest for another first message, VersionMismatch.
        """
        session = self._open.get(peer)
        if session is None:
            hello = message.message
            if not isinstance(hello, SessionHello):
                raise InvalidRequest(f"a session must begin with SessionHello, not {type(hello).__name__}")
            require_version(hello.protocol_version, f"conductor {hello.conductor_id}")
            session = self._new_session(peer)
            self._receive(session, message)
            return session.stream
        try:
            if not session.ended:
                self._receive(session, message)
        except Exception:
            self._end(session)
            raise
        return NO_ANSWER

    def _new_session(self, peer: Peer) -> ConductorSession:
        stream = AnswerStream(lambda: self._write(session))
        session = self._open[peer] = ConductorSession(stream)
        peer.on_close.append(partial(self._leave, peer))
        return session

    def _wake(self, session: ConductorSession) -> None:
        """Write in the next step of the loop, with everything added until then."""
        if not session.will_write:
            session.will_write = True
            self._loop.call_soon(self._write, session)

    def _write(self, session: ConductorSession) -> None:
        """Send pending output, while the conductor takes it; the last message in any case."""
        session.will_write = False
        stream = session.stream
        try:
            if session.welcome is not None and stream.has_room:
                welcome, session.welcome = session.welcome, None
                stream.send(FromWorker(welcome))
            while session.scores and (stream.has_room or session.ended):
                stream.send(FromWorker(StepOutput(scores=[session.scores.popleft()])))
            if session.is_due and (stream.has_room or session.ended):
                session.is_due = False
                stream.send(FromWorker(session.outbox.take(self._sequence, self._loop.time())))
        except InvalidRequest as error:
            _log.error("session.message_too_large", conductor=session.conductor_id, error=error.message)
            self._end(session)
        if session.ended:
            stream.end()
            self._abort_all(session)

    def _receive(self, session: ConductorSession, message: ToWorker) -> None:
        match message.message:
            case SessionHello(conductor_id=conductor_id):
                session.conductor_id = conductor_id
                self._engine.snapshot(lambda hashes, load, pending: self._welcome(session, hashes, load, pending))
            case Submit() as submit:
                self._submit(session, submit)
            case Abort(request_id=request_id):
                self._abort(request_id)
            case ReleaseExport(export_id=export_id):
                self._release_export(export_id)
            case PullAhead() as pull:
                self._pull(session, pull)

    def _submit(self, session: ConductorSession, submit: Submit) -> None:
        request_id = submit.request_id
        session.outbox.num_submits += 1
        number = session.outbox.num_submits
        ahead = RequestId(submit.ahead) if submit.ahead else None
        if ahead is not None:
            self._forget(ahead)  # it ends with the request from now on

        def refused(error: TanghuluError) -> None:
            if ahead is not None:
                self._abort(ahead)
            self._forget(request_id)
            session.outbox.refusal(request_id, error)
            self._flush(session)

        if self._draining:
            refused(Overloaded(f"worker {self._instance_id} is shutting down; use another worker"))
            return

        def begin(compiled: asyncio.Future[Any] | None = None) -> None:
            if self._owners.get(request_id) is not session:
                return  # it was aborted meanwhile
            try:
                if compiled is not None:
                    compiled.result()
                request = self._factory.request(submit)
            except TanghuluError as error:
                refused(error)
                return
            ids = {"x_request_id": submit.x_request_id, "traceparent": submit.traceparent}
            _log.debug("request.taken", request=request_id, **ids)
            self._engine.submit(request, lambda num_added: session.outbox.added.append((num_added, number)), refused)

        self._own(session, request_id)
        compiling = self._factory.compiling(submit)
        if compiling is None:
            begin()
        else:
            asyncio.wrap_future(compiling).add_done_callback(begin)

    def _own(self, session: ConductorSession, request_id: RequestId) -> None:
        """Note that ``request_id``, of a request or a pull, ends with the session."""
        previous = self._owners.get(request_id)
        if previous is not None:
            previous.requests.discard(request_id)
        self._owners[request_id] = session
        session.requests.add(request_id)
        self.idle.clear()

    def _pull(self, session: ConductorSession, pull: PullAhead) -> None:
        """Begin to fetch a prompt that another worker computes; failed parts are fetched when its request arrives."""
        name = pull.name
        if self._draining:
            return
        try:
            sequence, peer = self._factory.pulled(pull)
        except TanghuluError as error:
            _log.warning("pull.refused", name=name, code=error.code, error=error.message)
            return
        self._own(session, name)
        self._engine.pull_ahead(name, sequence, peer)

    def _abort(self, request_id: RequestId) -> None:
        self._forget(request_id)
        self._engine.abort(request_id)

    def _forget(self, request_id: RequestId) -> None:
        owner = self._owners.pop(request_id, None)
        if owner is not None:
            owner.requests.discard(request_id)
        if not self._owners:
            self.idle.set()

    # --- from the engine

    def _welcome(
        self, session: ConductorSession, hashes: Sequence[BlockHash], load: EngineLoad, pending: Sequence[KvEvent]
    ) -> None:
        if pending:  # events of commands before the snapshot: they precede it
            self._spread(pending, load)
        if session.ended:
            return
        session.outbox.snapshot()
        session.welcome = welcome_message(self._instance_id, self._generation, hashes, self._sequence, load.shared)
        self._sessions.add(session)
        self._wake(session)
        _log.info("session.opened", conductor=session.conductor_id, cached_blocks=len(hashes))

    def _spread(
        self, events: Sequence[KvEvent], load: EngineLoad, reads: Sequence[PeerRead] = (), num_steps: int = 0
    ) -> None:
        self._publish(events)
        messages = event_messages(events)
        self._sequence += len(messages)
        for session in list(self._sessions):
            session.outbox.steps(num_steps, messages, load, reads)
            self._flush_in_time(session)

    def on_reports(self, reports: Sequence[StepReport]) -> None:
        """Spread reports of steps: to each conductor its requests' outputs, to all the events and the load."""
        for report in reports:
            self._keep_scores(report.result.scores)
            sources = self._add_exports(report.exports) if report.exports else {}
            for output in report.result.outputs:
                owner, source = self._owners.get(output.request_id), sources.pop(output.request_id, None)
                if owner is not None:
                    output.source = source
                    owner.outbox.output(output)
                elif source is not None:
                    self._release_export(source.export_id)  # its conductor is gone: nobody will fetch it
                if output.finish is not None:
                    self._forget(output.request_id)
            for request_id, source in sources.items():  # of continuing prefills
                owner = self._owners.get(request_id)
                if owner is not None:
                    owner.outbox.output(Output(request_id, source=source))
        events = [event for report in reports for event in report.result.kv_events]
        reads = [read for report in reports for read in report.load.shared.reads]
        self._spread(events, reports[-1].load, reads, len(reports))

    def _keep_scores(self, scores: Iterable[PromptScoreArrays]) -> None:
        for each in scores:
            owner = self._owners.get(each.request_id)
            if owner is not None:
                owner.scores.extend(score_messages(each))
                self._wake(owner)

    def _flush_in_time(self, session: ConductorSession) -> None:
        """Flush the session's outbox at once if it has outputs, or nothing was sent for a while; else soon."""
        outbox = session.outbox
        if outbox.num_steps > MAX_UNREAD_STEPS:
            _log.warning("session.too_slow", conductor=session.conductor_id, unread=MAX_UNREAD_STEPS)
            self._end(session)
        elif outbox.is_due or self._loop.time() >= outbox.due_s:
            self._flush(session)
        elif session.flush_timer is None:
            session.flush_timer = self._loop.call_at(outbox.due_s, self._flush, session)

    def _flush(self, session: ConductorSession) -> None:
        self._cancel_timer(session)
        session.is_due = True
        self._wake(session)

    def _cancel_timer(self, session: ConductorSession) -> None:
        if session.flush_timer is not None:
            session.flush_timer.cancel()
            session.flush_timer = None

    # --- ends

    def _end(self, session: ConductorSession) -> None:
        """End the session, after the present content of its outbox."""
        self._sessions.discard(session)
        self._cancel_timer(session)
        if not session.ended:
            session.ended = True
            self._wake(session)

    def _leave(self, peer: Peer) -> None:
        session = self._open.pop(peer)
        session.ended = True
        self._sessions.discard(session)
        self._cancel_timer(session)
        self._abort_all(session)
        _log.info("session.closed", conductor=session.conductor_id)

    def _abort_all(self, session: ConductorSession) -> None:
        for request_id in list(session.requests):
            self._abort(request_id)

    def drain(self) -> None:
        """Refuse new requests from now on, so that they go to other workers; present ones continue."""
        self._draining = True

    def close(self) -> None:
        """End all sessions, now: the port closes next."""
        for session in list(self._sessions):
            self._end(session)
            self._write(session)
