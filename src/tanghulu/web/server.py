"""uvicorn inside a process's own event loop, and the socket that it listens on."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import ssl
import sys
import termios
from collections.abc import Callable, Iterator
from typing import ClassVar, cast

import structlog
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tanghulu.auth.tls import REFRESH_S, ServerTls
from tanghulu.errors import ConfigError
from tanghulu.runtime.accepting import accept_no_more
from tanghulu.types import Address

_log = structlog.get_logger(__name__)
_BACKLOG = 2048
#: Longer than clients keep idle connections, so that none of them sends into one that is being closed.
_KEEP_ALIVE_S = 75
#: Connections that have not come to the end of a header; the oldest goes when another comes.
MAX_HEADLESS = 256
#: A client that leaves what it was sent unread for so long is hung up on; what is unread is bounded meanwhile.
READ_STALL_S = 30.0


def listen(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """A socket that accepts on host:port (0 picks one). Raises ConfigError.

    With ``reuse_port`` other sockets may accept there too, which say so as well.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
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
    """The address that ``listener`` listens on."""
    host, port = listener.getsockname()[:2]
    return Address(host, port)


async def follow_files(tls: ServerTls) -> None:
    """Use certificates that were replaced for new connections, until cancelled."""
    while True:
        await asyncio.sleep(REFRESH_S)
        try:
            if tls.refresh():
                _log.info("tls.reloaded")
        except ConfigError as error:
            _log.error("tls.not_reloaded", error=error.message)


def _unread_in_kernel(transport: asyncio.Transport) -> int:
    """Bytes that the kernel has of an answer and the client's has not acknowledged; 0 where it does not say."""
    connection = transport.get_extra_info("socket")
    try:
        return int.from_bytes(fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except (OSError, AttributeError):
        return 0


class _Connection(HttpToolsProtocol):
    """uvicorn's; none stays that does not end a request's header in ``header_s``, or reads nothing for ``stall_s``.

    A client that reads too slowly first stops its answer: no more is taken from the application while 64 KiB are
    unread. When it is hung up on the application learns that it is gone, as of any client.
    """

    header_s = float(_KEEP_ALIVE_S)
    stall_s = READ_STALL_S
    _stalled: asyncio.TimerHandle | None = None
    _unread_bytes = 0
    #: Connections of the server from which a header is coming, the oldest first.
    headless: ClassVar[dict[_Connection, None]]
    #: Whether the server is ending; then a connection without a request goes.
    is_ending: ClassVar[bool] = False
    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        if self.is_ending:
            self.shutdown()
        else:
            self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._wait()
        else:
            self._wait_no_more()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
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
        """Look in ``stall_s`` whether the client has read anything of what is there for it now."""
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
        _log.warning(
            "http.reader_too_slow",
            path=self.scope["path"] if self.scope is not None else None,
            request=state.get("request_id"),
            x_request_id=state.get("x_request_id"),
            seconds=self.stall_s,
        )
        self.transport.abort()

    def _wait(self) -> None:
        """Start the time limit at the first piece of a header; later pieces do not prolong it."""
        if self._waiting is None and not self.transport.is_closing():
            self._waiting = asyncio.get_running_loop().call_later(self.header_s, self.transport.close)
            self.headless[self] = None
            if len(self.headless) > MAX_HEADLESS:
                oldest = next(iter(self.headless))
                oldest._wait_no_more()
                oldest.transport.abort()

    def _wait_no_more(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
            self.headless.pop(self, None)


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers (the process has its own), and without waking up ten times a second.

    Beyond ``max_connections`` it answers 503 by itself; a client has ``header_s`` to send a request's header, and
    ``stall_s`` to read some of an answer.
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
        protocol = type("Connection", (_Connection,), {"header_s": header_s, "stall_s": stall_s, "headless": {}})
        self._handshake_s = header_s
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                http=protocol,
                ws="none",
                timeout_graceful_shutdown=max(1, round(grace_s)),
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                server_header=False,
                date_header=False,
                limit_concurrency=max_connections,
            )
        )
        if tls is not None:
            self.config.load()
            self.config.ssl = tls
        self._stopping = asyncio.Event()
        self._listeners: list[socket.socket] = []
        self._connection: Callable[[], asyncio.Protocol] | None = None
        self._last: list[asyncio.Task[object]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on ``sockets``. As uvicorn does, but that TLS is to be agreed on in ``header_s``."""
        assert sockets, "it listens on sockets that are there"
        loop, config = asyncio.get_running_loop(), self.config
        await self.lifespan.startup()

        def connection() -> asyncio.Protocol:
            protocol = cast("type[_Connection]", config.http_protocol_class)
            return protocol(config=config, server_state=self.server_state, app_state=self.lifespan.state)

        self._connection, self._listeners = connection, sockets
        patience_s = None if config.ssl is None else self._handshake_s
        self.servers = [
            await loop.create_server(
                connection, sock=each, ssl=config.ssl, ssl_handshake_timeout=patience_s, backlog=config.backlog
            )
            for each in sockets
        ]
        self.started = True

    def hang_up_after_answers(self) -> None:
        """Close each connection behind its next answer, so that its client connects to another server."""
        self.server_state.default_headers.append((b"connection", b"close"))

    async def stop_accepting(self) -> None:
        """Take the connections that are made but not accepted yet, and listen no more: a close would reset them."""
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
        """End as uvicorn does, with those connections, too, that were accepted just before."""
        await accept_no_more(self.servers)
        cast("type[_Connection]", self.config.http_protocol_class).is_ending = True
        await super().shutdown(sockets)

    async def main_loop(self) -> None:
        await self._stopping.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to the process."""
        yield
