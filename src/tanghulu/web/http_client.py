"""HTTP/1.1 to one server, for streams of many small pieces: a third of httpx's processor time for each token.

A connection carries one request at a time and is kept for the next one for a short while. An answer is read piece by
piece as it comes; one that is not read to its end closes its connection, which is how engines learn of a client's
leave. No redirects, no proxies, no compression.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final, cast

import httptools

from tanghulu.types import Address

#: Idle connections kept, and seconds for which each is: servers close theirs after five or more.
MAX_IDLE, IDLE_S = 64, 2.0
#: Largest head of an answer; bytes of a body that wait before its connection is read no further.
MAX_HEAD_BYTES, MAX_WAITING_BYTES = 64 << 10, 1 << 20
_TEXT: Final = "latin-1"


class ConnectFailed(ConnectionError):
    """No connection to the server could be made."""


class HttpAnswer(asyncio.Protocol):
    """A connection with its current answer: ``status`` once that has begun, then its body by ``read``."""

    def __init__(self) -> None:
        self.status = 0
        self.ended = True
        self.idle_since_s = 0.0
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._num_waiting = self._num_head = 0
        self._has_length, self._stays = False, True
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    # --- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Parse bytes of the server; those behind an answer make the connection useless."""
        if self.ended:
            self.abort()
            return
        try:
            if not self.status:
                self._num_head += len(data)
            self._parser.feed_data(data)
            if self._num_head > MAX_HEAD_BYTES and not self.status:
                raise ValueError(f"the head of the answer has more than {MAX_HEAD_BYTES} bytes")
        except (httptools.HttpParserError, ValueError) as error:
            self._lose(ConnectionError(f"not an answer in HTTP/1.1: {error}"))
            self.abort()
        self._changed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note the end; it is also that of a body without a length."""
        self._transport = None
        if self.status and not self._has_length and exc is None:
            self.ended = True
        self._lose(exc or ConnectionError("the server closed the connection in the middle of the answer"))

    def _lose(self, error: Exception) -> None:
        self._error = self._error or error
        self._changed.set()

    # --- the parser's side

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note how the body ends."""
        self._has_length = self._has_length or name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        """Note the status; an interim answer (1xx) is followed by another one."""
        status = self._parser.get_status_code()
        self.status = status if status >= 200 else 0

    def on_body(self, body: bytes) -> None:
        """Keep a piece of the body."""
        self._pieces.append(body)
        self._num_waiting += len(body)
        if self._num_waiting > MAX_WAITING_BYTES and self._transport is not None:
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        """Note the end of the body."""
        self.ended = bool(self.status)
        self._stays = self._parser.should_keep_alive()

    # --- the user's side

    @property
    def usable(self) -> bool:
        """Whether the connection can carry another request."""
        is_open = self._transport is not None and not self._transport.is_closing() and self._error is None
        return is_open and self.ended and self._stays

    async def begin(self, head: bytes, content: bytes) -> None:
        """Send a request and wait for the status. Raises ConnectionError."""
        assert self.usable
        self.status = self._num_head = 0
        self.ended = self._has_length = False
        self._parser = httptools.HttpResponseParser(self)
        assert self._transport is not None
        self._transport.write(head + content)
        while not self.status:
            await self._wait()

    async def read(self) -> bytes:
        """Return the bytes of the body that have come, waiting for some; b"" at its end. Raises ConnectionError."""
        while not self._pieces:
            if self.ended:
                return b""
            await self._wait()
        data, self._pieces, self._num_waiting = b"".join(self._pieces), [], 0
        if self._transport is not None:
            self._transport.resume_reading()
        return data

    async def _wait(self) -> None:
        if self._error is not None:
            raise ConnectionError(str(self._error) or type(self._error).__name__) from self._error
        self._changed.clear()
        await self._changed.wait()

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()


class HttpClient:
    """Connections to one server, as many as there are requests."""

    def __init__(
        self,
        address: Address,
        *,
        tls: ssl.SSLContext | None = None,
        host: str = "",
        connect_timeout_s: float,
        socket_options: Sequence[tuple[int, int, int]] = (),
    ) -> None:
        """Open nothing yet. ``host`` is the name that the server's certificate must have."""
        self._address, self._connect_timeout_s, self._socket_options = address, connect_timeout_s, socket_options
        self._tls: dict[str, Any] = {"ssl": tls, "server_hostname": host} if tls is not None else {}
        self._loop = asyncio.get_running_loop()
        self._idle: list[HttpAnswer] = []
        self._used: set[HttpAnswer] = set()

    @contextlib.asynccontextmanager
    async def request(
        self, method: str, target: str, headers: Mapping[str, str], content: bytes = b"", *, fresh: bool = False
    ) -> AsyncIterator[HttpAnswer]:
        """Send a request; yield its answer, which has begun. ``fresh`` uses a connection for this request alone.

        Raises ConnectFailed, ConnectionError for what happens later, ValueError for a header with a line break.
        """
        lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        lines += [f"content-length: {len(content)}", *(["connection: close"] if fresh else []), "\r\n"]
        if any("\r" in each or "\n" in each for each in lines[:-1]):
            raise ValueError(f"a header of the request to {self._address} has a line break")
        head = "\r\n".join(lines).encode(_TEXT, errors="replace")
        answer = (None if fresh else self._pop()) or await self._connect()
        self._used.add(answer)
        try:
            await answer.begin(head, content)
            yield answer
        finally:
            self._used.discard(answer)
            if answer.usable and not fresh and len(self._idle) < MAX_IDLE:
                answer.idle_since_s = self._loop.time()
                self._idle.append(answer)
            else:
                answer.abort()

    def _pop(self) -> HttpAnswer | None:
        since_s = self._loop.time() - IDLE_S
        while self._idle:
            answer = self._idle.pop()
            if answer.usable and answer.idle_since_s > since_s:
                return answer
            answer.abort()
        return None

    async def _connect(self) -> HttpAnswer:
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                transport, answer = await self._loop.create_connection(
                    HttpAnswer, self._address.host, self._address.port, **self._tls
                )
            for option in self._socket_options:
                transport.get_extra_info("socket").setsockopt(*option)
        except TimeoutError:
            raise ConnectFailed(f"no connection within {self._connect_timeout_s:g} s") from None
        except OSError as error:
            raise ConnectFailed(str(error) or type(error).__name__) from error
        return answer

    def close(self) -> None:
        """Close all connections, whatever is under way on them."""
        for answer in [*self._idle, *self._used]:
            answer.abort()
        self._idle.clear()
