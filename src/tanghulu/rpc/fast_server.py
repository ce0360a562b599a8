"""The fast lane's server side, as an asyncio protocol: frames in, handlers called, frames out.

A handler that needs no waiting is a plain function and is answered in the same loop step. One that waits for a single
event returns a Later, set by the code that receives the event, without a task in between; others are coroutines. An
AnswerStream is an answer of many messages; the caller may send more under the same call id. Handlers raise typed
errors; anything else they raise is a bug: it is logged with its trace, answered as INTERNAL, and the connection stays.

Thirty bytes may request megabytes, so requests are answered only while their peer takes the answers: later ones wait
as received bytes, and nothing more is read.

"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from time import perf_counter
from types import CoroutineType
from typing import Any, Final, NamedTuple, TypeAlias, cast

import structlog

from tanghulu.auth.places import CONNECTIONS_ONE_IN, Caller, Places, Strangers, host_of
from tanghulu.auth.tenants import Identity
from tanghulu.errors import InvalidRequest, Overloaded, TanghuluError, Unauthorized
from tanghulu.rpc.frames import ERROR, Frame, FrameReader, PartialFrame, encode_head
from tanghulu.rpc.latency import Latencies
from tanghulu.rpc.methods import Method
from tanghulu.rpc.slow_peers import SLOW_PEER_S, Due, PendingBytes, SlowPeerWatch
from tanghulu.rpc.sockets import notice_dead_peer
from tanghulu.rpc.wire import Body, Failure, encode, parser_of
from tanghulu.runtime.limits import refuse_last_descriptors
from tanghulu.runtime.telemetry import RareLog

_log = structlog.get_logger(__name__)

#: A reply (a message or the bytes of one), or a reply with raw payload behind it.
Answer: TypeAlias = Body | tuple[Body, Sequence[bytes | memoryview]]
Handler: TypeAlias = Callable[["Peer", Any, memoryview], "Answer | Later | AnswerStream | Coroutine[Any, Any, Answer]"]
#: Called when the head of a large request has arrived but not its payload, of the given size; None: no sink.
SinkMaker: TypeAlias = Callable[["Peer", Any, int], "PayloadSink | None"]

MAX_CALLS_IN_FLIGHT = 256
MAX_CONNECTIONS = 16384
MAX_UNKNOWN_BYTES = 64 << 10
#: A peer that has neither authenticated (see ``FastService.guarded``) nor sent a request is disconnected after this.
HELLO_S = 10.0
#: Maximum such peers; a new one disconnects the oldest. They do not count as connections.
MAX_UNKNOWN_PEERS = 256
END_WAIT_S = 1.0
#: Bytes of answers in one step of the loop; further requests of the connection are answered in another.
MAX_STEP_BYTES = 8 << 20
#: Time after which further requests of the connection are answered in another step.
MAX_STEP_S = 0.001
#: Unsent bytes at which a peer counts as stopped; its requests are not answered then.
MAX_PEER_UNSENT_BYTES = 64 << 10
#: Bytes of unfinished requests of all connections; above this bound, those that have been arriving for ``PRESSED_S``
#: are given up.
MAX_COMING_BYTES = 256 << 20
#: The rest of a frame is read straight into its place if it is at least this large.
BULK_BYTES = 128 << 10


@dataclass(eq=False)
class Peer:
    """A server's state of one connection. ``state`` belongs to the service, which sets and reads it.

    ``identity`` is its proved identity, if there is a gate; ``hang_up`` ends the connection. ``pidfd`` opens
    a pidfd of the process, for the caller. ``roles`` are those in its certificate, see ``certificate_roles``.
    ``has_stream``: a stream of ``streams`` runs on the connection, which carries one.
    """

    pid: int | None  # of the process at the other end (Unix sockets only); see ``peer_process``
    is_unix: bool
    name: str
    state: Any = None
    on_close: list[Callable[[], None]] = field(default_factory=list)
    identity: Identity | None = None
    hang_up: Callable[[], None] = lambda: None
    pidfd: Callable[[], int] | None = None
    roles: frozenset[str] = frozenset()
    has_stream: bool = False


class Later:
    """A deferred answer: ``set`` it once, and it is sent in that same step of the event loop."""

    __slots__ = ("_answer", "_then")

    def __init__(self) -> None:
        self._answer: Answer | None = None
        self._then: Callable[[Answer], None] | None = None

    def set(self, answer: Answer) -> None:
        """Set the answer."""
        assert self._answer is None, "an answer is given once"
        self._answer = answer
        if self._then is not None:
            self._then(answer)

    def then(self, send: Callable[[Answer], None]) -> None:
        """Call ``send`` with the answer, now if it is set."""
        self._then = send
        if self._answer is not None:
            send(self._answer)


#: The answer of a method whose callers wait for none.
NO_ANSWER: Final = Later()


def _as_it_is(message: Any) -> Any:
    return message


class AnswerStream:
    """An answer of many messages, until the connection ends. Its maker sends, once the handler has returned it.

    ``send`` buffers what the peer does not take, so check ``has_room`` first; ``on_room`` is called when there is some
    again. A peer that takes too little for too long is disconnected, as with all answers (``unsent``).
    """

    __slots__ = ("_frame", "_protocol", "on_room", "view")

    def __init__(self, on_room: Callable[[], None]) -> None:
        self.on_room = on_room
        self.view: Callable[[Any], Body] = _as_it_is  # the part of a message that the peer may see
        self._protocol: FastServerProtocol | None = None
        self._frame = Frame(0, 0, b"")

    def begin(self, protocol: FastServerProtocol, frame: Frame) -> None:
        """Answer the call in ``frame`` from now on; called by the protocol."""
        self._protocol, self._frame = protocol, frame

    @property
    def has_room(self) -> bool:
        """Whether the peer keeps up with the messages."""
        return self._protocol is not None and self._protocol.takes

    def send(self, message: Body) -> None:
        """Send the next message, unless the peer is gone. Raises InvalidRequest for one that is too large."""
        assert self._protocol is not None, "the handler has returned by now"
        self._protocol.answer(self._frame, self.view(message))

    def fail(self, error: TanghuluError) -> None:
        """Send the error that ends the messages."""
        assert self._protocol is not None, "the handler has returned by now"
        self._protocol.fail(self._frame.call_id, error)

    def end(self) -> None:
        """Disconnect when the peer has taken what was sent, or has not in ``SLOW_PEER_S``."""
        assert self._protocol is not None, "the handler has returned by now"
        self._protocol.hang_up()


class PayloadSink(NamedTuple):
    """The destination of a request's payload, and the answer to the request in place of its handler.

    If the connection ends early, ``landed`` is not called; ``Peer.on_close`` is.
    """

    view: memoryview
    landed: Callable[[], Answer | Later]


class Served(NamedTuple):
    """An answered method: the parser of its requests, and its handler."""

    method: Method[Any, Any]
    parse: Callable[[bytes], Any]
    handler: Handler


@dataclass
class FastService:
    """The methods that a process answers, by their numbers.

    ``guarded``: peers must authenticate before they may send more than ``MAX_UNKNOWN_BYTES``.
    """

    served: dict[int, Served] = field(default_factory=dict)
    sinks: dict[int, SinkMaker] = field(default_factory=dict)
    peers: set[Peer] = field(default_factory=set)
    #: Connections that have not authenticated, the oldest first.
    unknown: Strangers[FastServerProtocol] = field(default_factory=lambda: Strangers())
    places: Places = field(default_factory=lambda: Places("connections", CONNECTIONS_ONE_IN))
    latencies: Latencies[str] = field(default_factory=Latencies)
    unsent: PendingBytes = field(default_factory=PendingBytes)
    coming: PendingBytes = field(default_factory=partial(PendingBytes, MAX_COMING_BYTES))
    max_connections: int = MAX_CONNECTIONS
    guarded: bool = False
    rare_log: RareLog = field(default_factory=lambda: RareLog(_log))

    def register(self, method: Method[Any, Any], handler: Handler) -> None:
        """Answer ``method`` by ``handler(peer, request, attachment)``; each method once."""
        assert method.number not in self.served, f"method {method.name} is registered twice"
        self.served[method.number] = Served(method, parser_of(method.request), handler)

    def register_sink(self, method: Method[Any, Any], make: SinkMaker) -> None:
        """Receive payload of ``method`` in the sink returned by ``make``; if it returns None, the handler answers."""
        assert method.number in self.served, f"method {method.name} has no handler"
        self.sinks[method.number] = make


class FastServerProtocol(asyncio.Protocol):
    """One connection of the fast lane; ``FastPort`` passes the transport once the preamble has arrived."""

    def __init__(self, service: FastService, peer: Peer) -> None:
        self._service = service
        self._peer = peer
        self._reader = FrameReader(self._place)
        self._sink: PayloadSink | None = None  # of the incoming frame
        self._transport: asyncio.Transport | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_later = 0
        self._unknown_bytes = 0  # received before authentication
        self._frames: Iterator[Frame] | None = None  # received and not answered yet
        self._answered_bytes = 0
        self._unsent = SlowPeerWatch(service.unsent, self._due_answers, self._takes_nothing)
        self._coming = SlowPeerWatch(service.coming, self._due_request, self._comes_too_slowly)
        self._held_up = False  # the peer is slow, or has too many calls in flight
        self._serving = self._will_serve = False
        self._paused = False
        self._ending: asyncio.TimerHandle | None = None
        self._hello_due: asyncio.TimerHandle | None = None  # before authentication
        self._caller: Caller | None = None  # once it has a place
        self._streams: list[AnswerStream] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport; refuse it if the process has too many peers."""
        self._transport = transport = cast(asyncio.Transport, transport)  # uvloop has its own, which is not a subclass
        transport.set_write_buffer_limits(high=MAX_PEER_UNSENT_BYTES)
        service = self._service
        self._peer.hang_up = transport.close
        service.peers.add(self._peer)
        self._hello_due = asyncio.get_running_loop().call_later(HELLO_S, self._hello_missed)
        service.unknown.enter(self, host_of(transport))
        oldest = service.unknown.make_way(MAX_UNKNOWN_PEERS)
        if oldest is not None:
            oldest.turn_out()

    @property
    def takes(self) -> bool:
        """Whether the peer takes its answers."""
        return not self._unsent.is_on

    def hang_up(self) -> None:
        """Close after sending what is buffered; after ``SLOW_PEER_S`` in any case."""
        transport = self._transport
        if transport is not None and not transport.is_closing():
            transport.close()
            self._ending = asyncio.get_running_loop().call_later(SLOW_PEER_S, transport.abort)

    def turn_out(self) -> None:
        """Make room for others; the peer has not authenticated."""
        self._known()
        if self._transport is not None:
            self._transport.abort()

    def _hello_missed(self) -> None:
        self._end(Unauthorized(f"no HELLO was received within {HELLO_S:g} s"))

    def _known(self) -> None:
        self._service.unknown.leave(self)
        if self._hello_due is not None:
            self._hello_due.cancel()
            self._hello_due = None

    def _meet(self) -> None:
        """Count the peer as a connection once it has authenticated; refuse it if the process has too many."""
        service = self._service
        if service.guarded and self._peer.identity is None:
            return
        self._known()
        caller = Caller.of(self._peer.identity)
        connection = self._transport.get_extra_info("socket") if self._transport is not None else None
        try:
            service.places.take(caller, service.max_connections)
            self._caller = caller
            if connection is not None:
                refuse_last_descriptors(connection.fileno())
        except Overloaded as error:
            self._end(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """End what the connection had started and notify the service."""
        if self._ending is not None:
            self._ending.cancel()
        self._frames = None
        self._unsent.end()
        self._coming.end()
        self._known()
        if self._caller is not None:
            self._service.places.give_back(self._caller)
            self._caller = None
        self._service.peers.discard(self._peer)
        for task in self._tasks:
            task.cancel()
        for callback in self._peer.on_close:
            callback()

    def data_received(self, data: bytes) -> None:
        """Answer every frame that ``data`` completes."""
        if self._ending is not None:
            return
        if self._service.guarded and self._peer.identity is None:
            self._unknown_bytes += len(data)
            if self._ends_unknown(0):
                return
        try:
            if self._frames is None and not self._held_up:
                only = self._reader.whole(data)
                if only is not None:
                    self._take(only)
                    return
        except InvalidRequest as error:
            self._end_of_sense(error)
            return
        frames = self._reader.feed(data)
        self._frames = frames if self._frames is None else chain(self._frames, frames)
        if not self._will_serve:
            self._serve()

    def _serve(self) -> None:
        """Answer the received frames, within the limits of the peer and of this step of the loop."""
        self._will_serve = False
        if self._frames is None or self._transport is None:
            return
        self._serving = True
        until, until_s = self._answered_bytes + MAX_STEP_BYTES, perf_counter() + MAX_STEP_S
        try:
            while not self._held_up and self._answered_bytes < until and self._frames is not None:
                if perf_counter() > until_s:
                    break
                frame = next(self._frames, None)
                if frame is None:
                    self._frames = None
                elif self._ending is None and not self._transport.is_closing():
                    self._take(frame)
        except InvalidRequest as error:
            self._frames = None
            self._end_of_sense(error)
        self._serving = False
        self._pace()
        partial = self._reader.partial
        if self._frames is None and partial is not None:
            self._coming.begin()
            if partial.missing >= BULK_BYTES and not self._ends_unknown(partial.missing):
                self._read_by(_Bulk(self, partial))

    def _ends_unknown(self, missing_bytes: int) -> bool:
        """End the connection if its peer sends, or announces, too much before it authenticates."""
        is_known = not self._service.guarded or self._peer.identity is not None
        if is_known or self._unknown_bytes + missing_bytes <= MAX_UNKNOWN_BYTES:
            return False
        self._end(Unauthorized(f"more than {MAX_UNKNOWN_BYTES} bytes before a HELLO with a token; send HELLO first"))
        return True

    def _end_of_sense(self, error: InvalidRequest) -> None:
        self._service.rare_log.warning("fast_lane.bad_frame", peer=self._peer.name, error=error.message)
        self._end(error)

    def _place(self, method: int, body: bytes, attachment_bytes: int) -> memoryview | None:
        """Return where to receive the coming payload, or None. A bad request is reported later, by its handler."""
        make = self._service.sinks.get(method)
        if make is None:
            return None
        try:
            self._sink = make(self._peer, self._service.served[method].parse(body), attachment_bytes)
        except TanghuluError:
            return None
        return None if self._sink is None else self._sink.view

    def _read_by(self, protocol: asyncio.BaseProtocol) -> None:
        assert self._transport is not None
        if self._transport.is_closing():
            return
        if not self._paused:
            self._transport.pause_reading()
        self._transport.set_protocol(protocol)
        if not self._paused:
            self._transport.resume_reading()

    def bulk_ended(self) -> None:
        """Take the completed large frame."""
        self._coming.end()
        self._read_by(self)
        frame = self._reader.finish()
        if self._ending is None:
            self._take(frame)

    def _end(self, error: TanghuluError) -> None:
        """Send the reason and disconnect. Further input is read and dropped: a reset would overtake the answer."""
        assert self._transport is not None
        if self._transport.is_closing() or self._ending is not None:
            return
        self.fail(0, error)
        if self._transport.can_write_eof():  # TLS cannot close one direction
            self._transport.write_eof()
        self._ending = asyncio.get_running_loop().call_later(END_WAIT_S, self._transport.close)

    def pause_writing(self) -> None:
        """Stop reading from a peer that does not read its answers."""
        self._unsent.begin()
        self._pace()

    def resume_writing(self) -> None:
        """Resume, as the peer reads again."""
        self._unsent.end()
        self._pace()
        for stream in self._streams:
            stream.on_room()

    def _due_answers(self) -> Due:
        assert self._transport is not None
        unsent_bytes = self._transport.get_write_buffer_size()
        return Due(None, unsent_bytes, unsent_bytes)

    def _takes_nothing(self, unsent_bytes: int) -> None:
        self._give_up("fast_lane.peer_takes_nothing", unsent_bytes=unsent_bytes)

    def _due_request(self) -> Due | None:
        partial = self._reader.partial
        if partial is None:
            return None
        return Due(object() if self._paused else partial, partial.missing, partial.held_bytes)  # paused: not its fault

    def _comes_too_slowly(self, missing_bytes: int) -> None:
        self._give_up("fast_lane.request_comes_too_slowly", missing_bytes=missing_bytes)

    def _give_up(self, event: str, **values: int) -> None:
        """Disconnect a peer that moves too little."""
        assert self._transport is not None
        self._service.rare_log.warning(event, peer=self._peer.name, **values)
        self._transport.abort()

    def _pace(self) -> None:
        """Serve the peer, and read from it, only while it reads from us and has few enough calls in flight."""
        assert self._transport is not None
        most = MAX_CALLS_IN_FLIGHT // 2 if self._held_up else MAX_CALLS_IN_FLIGHT - 1
        self._held_up = self._unsent.is_on or len(self._tasks) + self._num_later > most
        paused = self._held_up or self._frames is not None
        if paused != self._paused and not self._transport.is_closing():
            self._paused = paused
            (self._transport.pause_reading if paused else self._transport.resume_reading)()
        if self._frames is not None and not (self._held_up or self._serving or self._will_serve):
            self._will_serve = True  # not at once: this may be inside another call's handler
            asyncio.get_running_loop().call_soon(self._serve)

    def _take(self, frame: Frame) -> None:
        """Answer one request; the first ones of a peer authenticate it."""
        if self._hello_due is None:
            self._dispatch(frame)
            return
        if not self._service.guarded:
            self._meet()
        if self._ending is None:
            self._dispatch(frame)
        if self._hello_due is not None:
            self._meet()

    def _dispatch(self, frame: Frame) -> None:
        served = self._service.served.get(frame.method)
        if served is None:
            self.fail(frame.call_id, InvalidRequest(f"fast-lane method {frame.method} is not served here"))
            return
        method, parse, handler = served
        sink, self._sink = self._sink, None
        begun = perf_counter()
        try:
            if sink is None:
                answer = handler(self._peer, parse(frame.body), memoryview(frame.attachment))
            else:
                answer = sink.landed()
            kind = type(answer)
            if kind is not Later and kind is not CoroutineType and kind is not AnswerStream:
                self.answer(frame, cast(Answer, answer))
                self._service.latencies.took(method.name, perf_counter() - begun)
                return
        except TanghuluError as error:
            self.fail(frame.call_id, error)
            self._service.latencies.took(method.name, perf_counter() - begun)
            return
        except Exception:  # noqa: BLE001 - a handler's bug must not end the connection's other calls
            self._internal(frame)
            return
        if answer is NO_ANSWER:
            return
        if isinstance(answer, AnswerStream):
            self._begin(answer, frame)
            return
        if isinstance(answer, Later):
            self._num_later += 1
            answer.then(partial(self._send_later, frame, method.name, begun))
        else:
            coming = cast("Coroutine[Any, Any, Answer]", answer)
            task = asyncio.ensure_future(self._finish(frame, method.name, begun, coming))
            self._tasks.add(task)
            task.add_done_callback(partial(self._task_done, coming))
        self._pace()

    def _begin(self, stream: AnswerStream, frame: Frame) -> None:
        assert self._transport is not None
        notice_dead_peer(self._transport.get_extra_info("socket"))
        stream.begin(self, frame._replace(body=b""))
        self._streams.append(stream)

    def _send_later(self, frame: Frame, name: str, begun: float, answer: Answer) -> None:
        self._num_later -= 1
        self.answer(frame, answer)
        self._service.latencies.took(name, perf_counter() - begun)
        if self._paused and self._transport is not None:
            self._pace()

    async def _finish(self, frame: Frame, name: str, begun: float, answer: Coroutine[Any, Any, Answer]) -> None:
        try:
            self.answer(frame, await answer)
        except TanghuluError as error:
            self.fail(frame.call_id, error)
        except Exception:  # noqa: BLE001 - as above
            self._internal(frame)
        self._service.latencies.took(name, perf_counter() - begun)

    def _task_done(self, answer: Coroutine[Any, Any, Answer], task: asyncio.Task[None]) -> None:
        answer.close()  # not begun if the connection was lost at once
        self._tasks.discard(task)
        self._pace()

    def _internal(self, frame: Frame) -> None:
        _log.exception("fast_lane.handler_failed", method=frame.method, peer=self._peer.name)
        self.fail(frame.call_id, TanghuluError(f"internal error in method {frame.method}; see the log"))

    def answer(self, frame: Frame, answer: Answer) -> None:
        """Send an answer to the call in ``frame``."""
        message, attachment = answer if isinstance(answer, tuple) else (answer, ())
        body = encode(message)
        size = sum([len(part) for part in attachment]) if attachment else 0
        self._answered_bytes += len(body) + size
        self._write(encode_head(frame.method, frame.call_id, len(body), size) + body, attachment)

    def fail(self, call_id: int, error: TanghuluError) -> None:
        """Answer the call ``call_id`` with ``error``."""
        body = encode(Failure.of(error))
        self._write(encode_head(ERROR, call_id, len(body), 0) + body, ())

    def _write(self, head: bytes, attachment: Sequence[bytes | memoryview]) -> None:
        if self._transport is None or self._ending is not None or self._transport.is_closing():
            return  # nobody reads it now
        was_slow = self._unsent.is_on
        if attachment:
            self._transport.writelines([head, *attachment])
        else:
            self._transport.write(head)
        if was_slow:
            self._unsent.added(len(head) + sum(map(len, attachment)))


class _Bulk(asyncio.BufferedProtocol):
    """Receives the rest of one large frame straight into its place: saves a copy and an allocation per read."""

    def __init__(self, main: FastServerProtocol, partial: PartialFrame) -> None:
        self._main = main
        self._partial = partial

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle a loss in the middle of the frame."""
        self._main.connection_lost(exc)

    def pause_writing(self) -> None:
        """Forward to the main protocol."""
        self._main.pause_writing()

    def resume_writing(self) -> None:
        """Forward to the main protocol."""
        self._main.resume_writing()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the place of the next bytes, never beyond the frame."""
        return self._partial.rest

    def buffer_updated(self, nbytes: int) -> None:
        """Count received bytes."""
        self._partial.filled(nbytes)
        if not self._partial.missing:
            self._main.bulk_ended()
