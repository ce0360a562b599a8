"""An HTTP port of a process: its socket, its callers, and uvicorn inside the process's own event loop.

``Server`` is used by the conductor, the routers and the gateway, each with its own application; ``HttpServer`` is
uvicorn with bounds on connections, headers and slow readers.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import math
import re
import socket
import ssl
import sys
import termios
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Final, cast

import structlog
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from tanghulu.auth.api_keys import ApiKeysFile
from tanghulu.auth.handshakes import Handshakes
from tanghulu.auth.key_limits import KeyAccounts
from tanghulu.auth.places import Strangers, host_of
from tanghulu.errors import ConfigError, InvalidRequest, NodeUnavailable, TanghuluError
from tanghulu.runtime.limits import allow_descriptors
from tanghulu.runtime.master_options import HttpOptions, ServerOptions
from tanghulu.runtime.tasks import accept_no_more, beside
from tanghulu.runtime.telemetry import RareLog
from tanghulu.types import Address
from tanghulu.web.access import HttpAuthorizer, OwnSite, RouteRights, listed
from tanghulu.web.errors import HeaderTooLarge, TooManyConnections, answer_to, is_anthropic, status_of

_log = structlog.get_logger(__name__)
_BACKLOG = 2048
#: Longer than clients keep idle connections, so that none of them sends into one being closed.
_KEEP_ALIVE_S = 75
#: Maximum connections with an unfinished header; a new one evicts another.
MAX_HEADLESS = 256
#: Connections beyond the bound, answered for probes only: an orchestrator's must not fail because of clients.
PROBES: Final = ("/live", "/ready")
MAX_BEYOND: Final = 64
#: Bound of a request's line and header, or the trailer of its body; each field counts as its text and _FIELD_BYTES.
MAX_HEADER_BYTES = 64 << 10
_FIELD_BYTES = 32
#: Requests queued on a connection behind unfinished answers.
MAX_PIPELINED = 16
#: Seconds after which a client that reads nothing of its answer is disconnected; unread data is bounded meanwhile.
READ_STALL_S = 30.0


#: Java's client offers it with each request. The parser would take what follows as no longer HTTP/1.1.
_H2C = re.compile(rb"\r\nupgrade:[ \t]*h2c[ \t]*(?=\r\n)", re.IGNORECASE)
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:=+/@\-]{1,128}")


def request_id_of(given: Sequence[str]) -> str:
    """Return the client's first id for the request that is valid in a header and a log; else a new one."""
    return next((each for each in given if _REQUEST_ID.fullmatch(each)), "") or uuid.uuid4().hex


def id_headers(scope: Scope, request_id: str) -> list[tuple[bytes, bytes]]:
    """Return the fields of an answer that report its request's id; Anthropic's clients look for ``request-id``."""
    names = (b"x-request-id", b"request-id") if is_anthropic(scope) else (b"x-request-id",)
    return [(name, request_id.encode()) for name in names]


def listen(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """Return a socket that accepts on host:port (0 picks one). Raises ConfigError.

    With ``reuse_port`` other sockets with this option may accept there, too.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's delay off only where the protocol is named; uvloop always does.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from error
    return listener


def address_of(listener: socket.socket) -> Address:
    """Return the address that ``listener`` listens on."""
    host, port = listener.getsockname()[:2]
    return Address(host, port)


async def _too_many_connections(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request on a connection beyond the bound, and disconnect."""
    response = answer_to(TooManyConnections("this process has reached its limit of connections; retry in a moment"))
    given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"]
    response.headers.update({"connection": "close", "x-request-id": request_id_of(given)})
    await response(scope, receive, send)


def _ended_by_closing(cycle: RequestResponseCycle, app: Any) -> Any:
    """Return ``app`` for a client of HTTP/1.0, which takes no chunks: its answer ends with the connection."""

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_plain(message: Message) -> None:
            cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        cycle.chunked_encoding = False
        await app(scope, receive, send_plain)

    return served


def _ended_with_reason(cycle: RequestResponseCycle, app: Any) -> Any:
    """Return ``app`` with an answer for a request that is cancelled at shutdown before it has one."""

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except asyncio.CancelledError:
            if cycle.response_started:
                raise
            error = NodeUnavailable("the server is shutting down; send the request to another one or retry later")
            await answer_to(error)(scope, receive, send)

    return served


def _unread_in_kernel(transport: asyncio.Transport) -> int:
    """Return the bytes of an answer in the kernel that the client's has not acknowledged; 0 if unknown."""
    connection = transport.get_extra_info("socket")
    try:
        return int.from_bytes(fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except (OSError, AttributeError):
        return 0


class _Connection(HttpToolsProtocol):
    """uvicorn's protocol, with the limits ``header_s`` for a request's header and ``stall_s`` without any reading.

    A client that reads too slowly first stops its answer: no more is taken from the application while 64 KiB are
    unread. When it is disconnected, the application is notified as for any client.
    """

    header_s = float(_KEEP_ALIVE_S)
    stall_s = READ_STALL_S
    _stalled: asyncio.TimerHandle | None = None
    _unread_bytes = 0
    most = 0  # connections; 0 means unlimited
    #: Connections of the server with an unfinished header; and all that have no request in progress.
    headless: ClassVar[Strangers[_Connection]]
    resting: ClassVar[Strangers[_Connection]]
    rare_log: ClassVar[RareLog]
    _is_beyond = False
    #: Whether the server is ending; then connections without a request are closed.
    is_ending: ClassVar[bool] = False
    _waiting: asyncio.TimerHandle | None = None
    #: The incoming header or trailer: its complete fields, and bytes that have not become a field or a body.
    _header_bytes = 0
    _loose_bytes = 0
    _in_body = False
    _refusal: TanghuluError | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        if self.is_ending:
            self.shutdown()
            return
        if self.most and len(self.connections) > self.most:
            resting = self.resting.make_way(0)
            if resting is not None:
                resting.transport.abort()
            elif len(self.connections) > self.most + MAX_BEYOND:
                transport.abort()
                return
            else:
                self._is_beyond = True
        self.resting.enter(self, host_of(transport))
        self._wait()

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        self._loose_bytes += len(data)
        if not self._in_body:
            head, end, rest = data.partition(b"\r\n\r\n")
            data = b"%s%s%s" % (_H2C.sub(b"", head + end[:2]), end[2:], rest)
        super().data_received(data)
        if self._loose_bytes > MAX_HEADER_BYTES and self._refusal is None:
            self._refusal = _too_large()
            self.send_400_response("")
        if self.cycle is None or self.cycle.response_complete:
            self._wait()
        else:
            self._wait_no_more()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Run ``app``; on a connection beyond the bound for probes only."""
        self.resting.leave(self)
        is_refused = self._is_beyond and len(self.connections) > self.most and cycle.scope["path"] not in PROBES
        served: Any = _too_many_connections if is_refused else _ended_with_reason(cycle, app)
        super()._start_asgi_task(
            cycle, served if cycle.scope["http_version"] != "1.0" else _ended_by_closing(cycle, served)
        )

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes = self._loose_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + _FIELD_BYTES)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._header_bytes = self._loose_bytes = 0
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refusal = HeaderTooLarge(
                f"{MAX_PIPELINED} requests wait on this connection; read their answers first"
            )
            raise self._refusal
        self._in_body = any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers)
        if self._in_body and self.parser.should_upgrade():
            self._refusal = InvalidRequest("the connection cannot be upgraded; send the request without Upgrade")
            raise self._refusal
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_body = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing() and self.cycle.response_complete:
            self.resting.enter(self, host_of(self.transport))

    def on_body(self, body: bytes) -> None:
        self._loose_bytes = 0
        super().on_body(body)

    def _count(self, num_bytes: int) -> None:
        """Count bytes of the header; an error raised here stops the parser, and ``send_400_response`` answers."""
        self._header_bytes += num_bytes
        if self._header_bytes > MAX_HEADER_BYTES:
            self._refusal = _too_large()
            raise self._refusal

    def _unsupported_upgrade_warning(self) -> None:
        """Do nothing: uvicorn logs two lines for each piece."""

    def send_400_response(self, msg: str) -> None:
        """Answer unsupported input or invalid HTTP in the shape of all other errors, and disconnect."""
        if self._refusal is not None and self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()  # an answer is in progress, or due first
            return
        if isinstance(self._refusal, HeaderTooLarge):
            self.rare_log.warning("http.header_too_large", client=self.client)
        error = self._refusal or InvalidRequest(msg)
        response = answer_to(error)
        response.headers["connection"] = "close"
        head = b"".join(b"%s: %s\r\n" % header for header in response.raw_headers)
        self.transport.write(STATUS_LINE[status_of(error)] + head + b"\r\n" + bytes(response.body))
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.resting.leave(self)
        self._wait_no_more()
        self._read_again()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stalled is None:
            self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._read_again()

    def _read_again(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _watch_reader(self) -> None:
        """Check after ``stall_s`` whether the client has read any of the present data."""
        self._unread_bytes = self.transport.get_write_buffer_size() + _unread_in_kernel(self.transport)
        self._stalled = asyncio.get_running_loop().call_later(self.stall_s, self._look_at_reader)

    def _look_at_reader(self) -> None:
        before_bytes = self._unread_bytes
        self._watch_reader()
        if self._unread_bytes >= before_bytes:
            self._read_again()
            self._hang_up_on_reader()

    def _hang_up_on_reader(self) -> None:
        state = self.scope.get("state", {}) if self.scope is not None else {}
        self.rare_log.warning(
            "http.reader_too_slow",
            path=self.scope["path"] if self.scope is not None else None,
            request=state.get("request_id"),
            x_request_id=state.get("x_request_id"),
            seconds=self.stall_s,
        )
        self.transport.abort()

    def _wait(self) -> None:
        """Start the time limit at the first piece of a header; later pieces do not extend it."""
        if self._waiting is None and not self.transport.is_closing():
            self._waiting = asyncio.get_running_loop().call_later(self.header_s, self.transport.close)
            self.headless.enter(self, host_of(self.transport))
            oldest = self.headless.make_way(MAX_HEADLESS)
            if oldest is not None:
                oldest._wait_no_more()
                oldest.transport.abort()

    def _wait_no_more(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
            self.headless.leave(self)


def _too_large() -> HeaderTooLarge:
    return HeaderTooLarge(
        f"the request's line and header have more than {MAX_HEADER_BYTES} bytes, each field counted as its text and "
        f"{_FIELD_BYTES}; send long values in the body"
    )


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers (the process has its own), and without waking up ten times a second.

    With ``max_connections``, one without a request is closed for a new one; if all have one, it answers 503 by
    itself, except to ``PROBES``. A client has ``header_s`` to send a request's header, and ``stall_s`` to read some
    of an answer.
    """

    def __init__(
        self,
        app: ASGIApp,
        grace_s: float,
        *,
        tls: ssl.SSLContext | None = None,
        max_connections: int | None = None,
        header_s: float = _KEEP_ALIVE_S,
        stall_s: float = READ_STALL_S,
    ) -> None:
        protocol = type(
            "Connection",
            (_Connection,),
            {
                "header_s": header_s,
                "stall_s": stall_s,
                "most": max_connections or 0,
                "headless": Strangers(),
                "resting": Strangers(),
                "rare_log": RareLog(_log),
            },
        )
        self._handshake_s = header_s
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                http=protocol,
                ws="none",
                timeout_graceful_shutdown=math.ceil(grace_s) + 1,  # its owner ends requests first
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                server_header=False,
                date_header=False,
            )
        )
        if tls is not None:
            self.config.load()
            self.config.ssl = tls
        self._stopping = asyncio.Event()
        self._listeners: list[socket.socket] = []
        self._handshakes: Handshakes | None = None
        self._connection: Callable[[], asyncio.Protocol] | None = None
        self._last: list[asyncio.Task[object]] = []

    def start(self, listener: socket.socket) -> None:
        """Serve on ``listener`` as the task ``serving``."""
        self.address = address_of(listener)
        self.serving = asyncio.create_task(self.serve(sockets=[listener]))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on ``sockets``, like uvicorn, but TLS handshakes are limited to ``header_s`` and in number."""
        assert sockets, "it listens on sockets that are there"
        loop, config = asyncio.get_running_loop(), self.config
        await self.lifespan.startup()

        def connection() -> asyncio.Protocol:
            protocol = cast("type[_Connection]", config.http_protocol_class)
            return protocol(config=config, server_state=self.server_state, app_state=self.lifespan.state)

        self._connection, self._listeners = connection, sockets
        arrival = connection
        if config.ssl is not None:
            arrival = self._handshakes = Handshakes(config.ssl, connection, self._handshake_s)
        self.servers = [await loop.create_server(arrival, sock=each, backlog=config.backlog) for each in sockets]
        self.started = True

    def hang_up_after_answers(self) -> None:
        """Close each connection after its next answer, so that its client connects to another server."""
        self.server_state.default_headers.append((b"connection", b"close"))

    async def stop_accepting(self) -> None:
        """Accept pending connections, which a close would reset, and stop listening."""
        loop, connection = asyncio.get_running_loop(), self._connection
        assert connection is not None, "it has started"
        await accept_no_more(self.servers)
        for listener, server in zip(self._listeners, self.servers, strict=True):
            with contextlib.suppress(BlockingIOError):
                while True:
                    last, _ = listener.accept()
                    taking = loop.connect_accepted_socket(connection, last, ssl=self.config.ssl)
                    self._last.append(asyncio.ensure_future(taking))
            server.close()

    def stop(self) -> None:
        """Accept no more connections, let the open requests end, then end ``serve``."""
        self.should_exit = True
        self._stopping.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End as uvicorn does, including connections accepted just before."""
        await accept_no_more(self.servers)
        cast("type[_Connection]", self.config.http_protocol_class).is_ending = True
        if self._handshakes is not None:
            self._handshakes.close()
        await super().shutdown(sockets)

    async def main_loop(self) -> None:
        await self._stopping.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to the process."""
        yield


class Server:
    """An HTTP port with the keys, certificates and bounds of ``options``; pages of ``origins`` may use it.

    Raises ConfigError for an unusable file.
    """

    def __init__(self, options: ServerOptions, host: str, origins: Iterable[str] = ()) -> None:
        self._options, self._host, self._origins = options, host, tuple(origins)
        api_keys = options.api_keys if isinstance(options, HttpOptions) else None
        self.keys = None if api_keys is None else ApiKeysFile(api_keys)
        self._tls = options.http_tls()
        self._authorizer: HttpAuthorizer | None = None

    def authorized(self, app: ASGIApp, rights: RouteRights, accounts: KeyAccounts | None = None) -> ASGIApp:
        """Return ``app`` for callers with a key, if keys are required, and for no page of another site."""
        if self.keys is not None:
            app = self._authorizer = HttpAuthorizer(app, self.keys, rights, accounts)
        return OwnSite(app, self._host, listed(self._options.allowed_hosts), self._origins)

    @contextlib.asynccontextmanager
    async def serving(
        self,
        app: ASGIApp,
        port: int,
        grace_s: float,
        *,
        reuse_port: bool = False,
        header_s: float = _KEEP_ALIVE_S,
        stall_s: float = READ_STALL_S,
    ) -> AsyncIterator[HttpServer]:
        """Serve ``app``, which ``authorized`` returned or which contains it; end within ``grace_s`` after the block.

        Raises ConfigError if the port is taken.
        """
        listener = listen(self._host, port, reuse_port=reuse_port)
        allow_descriptors(self._options.max_connections)
        tls = None if self._tls is None else self._tls.context
        server = HttpServer(
            app,
            grace_s,
            tls=tls,
            max_connections=self._options.max_connections,
            header_s=header_s,
            stall_s=stall_s,
        )
        server.start(listener)
        following = [] if self._tls is None else [self._tls.follow()]
        if self._authorizer is not None:
            following.append(self._authorizer.watch())
        try:
            async with beside(*following):
                yield server
        finally:
            server.stop()
            await asyncio.wait([server.serving], timeout=grace_s)
            server.force_exit = True
            await asyncio.gather(server.serving, return_exceptions=True)
            listener.close()
