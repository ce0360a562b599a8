"""HTTP to one engine server: whole answers within a deadline, streams without one, errors typed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import msgspec

from tanghulu.auth.credentials import TlsFiles, read_token
from tanghulu.auth.tls import client_context
from tanghulu.conductor.engines.servers import EngineServer
from tanghulu.errors import DeadlineExceeded, InvalidRequest, NodeUnavailable, Overloaded, TanghuluError
from tanghulu.rpc.sockets import SILENT_HOST_S, dead_peer_options
from tanghulu.web.event_stream import EventReader
from tanghulu.web.http_client import ConnectFailed, HttpAnswer, HttpClient

CONNECT_TIMEOUT_S = 2.0
CALL_DEADLINE_S = 10.0
#: Largest answer read whole, and largest event of a stream.
MAX_ANSWER_BYTES = 64 << 20
#: Statuses of a server that has not begun: another may take the request.
_TRY_ELSEWHERE = (429, 503)
_SHOWN_CHARACTERS = 500


class EngineGone(NodeUnavailable):
    """Nothing listens at the server's address."""


class EngineClient:
    """Connections to one server, as many as there are requests."""

    def __init__(self, server: EngineServer, tls: TlsFiles) -> None:
        """Read the server's API key. Raises ConfigError."""
        self.server = server
        key = read_token(f"@{server.key}") if server.key else ""
        self._headers = {"host": str(server.host_port), "content-type": "application/json"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"
        self._path = urlsplit(server.base_url).path
        self._http = HttpClient(
            server.address,
            tls=client_context(tls) if server.url.startswith("https") else None,
            host=server.host_port.host,
            connect_timeout_s=CONNECT_TIMEOUT_S,
            socket_options=dead_peer_options(SILENT_HOST_S),
        )

    async def call(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        deadline_s: float = CALL_DEADLINE_S,
        optional: bool = False,
    ) -> bytes:
        """Return the answer to GET, or to POST with ``body``; b"" if it is ``optional`` and there is none.

        Raises EngineGone, DeadlineExceeded, NodeUnavailable, or the server's refusal.
        """
        # A new connection: one that stays open is served after the server has stopped listening.
        try:
            async with asyncio.timeout(deadline_s), self._send(path, body, {}, fresh=True) as answer:
                data = await self._read(answer)
        except TimeoutError:
            raise DeadlineExceeded(f"{self.server.url}{path} did not answer within {deadline_s:g} s") from None
        if answer.status == 404 and optional:
            return b""
        if answer.status >= 400:
            raise self._refusal(answer.status, data)
        return data

    async def events(
        self, path: str, body: dict[str, Any], headers: dict[str, str], whole: bool = False
    ) -> AsyncGenerator[list[bytes], None]:
        """Yield the data of the events of the answer to ``body``, as they come, or the ``whole`` answer as one.

        Raises Overloaded if another server may take the request at once, EngineGone, NodeUnavailable, InvalidRequest.
        """
        async with self._send(path, body, headers) as answer:
            if answer.status >= 400:
                raise self._refusal(answer.status, await self._read(answer))
            if whole:
                yield [await self._read(answer)]
                return
            reader = EventReader()
            while piece := await answer.read():
                if events := reader.feed(piece):
                    yield events

    @contextlib.asynccontextmanager
    async def _send(
        self, path: str, body: dict[str, Any] | None, headers: dict[str, str], *, fresh: bool = False
    ) -> AsyncIterator[HttpAnswer]:
        content = msgspec.json.encode(body) if body is not None else b""
        method, headers = "GET" if body is None else "POST", {**self._headers, **headers}
        try:
            async with self._http.request(method, self._path + path, headers, content, fresh=fresh) as answer:
                yield answer
        except ConnectFailed as error:
            raise EngineGone(f"{self.server.url} refuses connections: {error}") from error
        except (ConnectionError, ValueError) as error:
            raise NodeUnavailable(f"{self.server.url} broke off: {error}") from error

    async def _read(self, answer: HttpAnswer) -> bytes:
        pieces, size = [], 0
        while piece := await answer.read():
            pieces.append(piece)
            size += len(piece)
            if size > MAX_ANSWER_BYTES:
                raise NodeUnavailable(f"{self.server.url} answered with more than {MAX_ANSWER_BYTES >> 20} MiB")
        return b"".join(pieces)

    def _refusal(self, status: int, data: bytes) -> TanghuluError:
        try:
            found: Any = msgspec.json.decode(data)
            error = found.get("error", found)
            message = str(error.get("message", "") if isinstance(error, dict) else error)
        except (msgspec.MsgspecError, UnicodeDecodeError, AttributeError):
            message = data[:_SHOWN_CHARACTERS].decode(errors="replace")
        return error_of(status, message[:_SHOWN_CHARACTERS], self.server.id or self.server.url)

    async def close(self) -> None:
        """Close all connections, whatever is under way on them."""
        self._http.close()


def error_of(status: int, message: str, server: str) -> TanghuluError:
    """Return the typed error for an engine's own: the request's fault below 500, and retryable from there."""
    text = f"worker {server} refused the request: {message}" if message else f"worker {server} answered {status}"
    if status in (401, 403):
        return NodeUnavailable(f"{text}; name the file with its API key: --engine …,key=FILE")
    if status in _TRY_ELSEWHERE:
        return Overloaded(text)
    return InvalidRequest(text) if 400 <= status < 500 and status not in (404, 408) else NodeUnavailable(text)
