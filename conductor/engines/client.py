"""HTTP to one engine server: whole answers within a deadline, streams without one, errors typed.

By aiohttp: it takes a quarter of the processor time of httpx for each piece of a stream, of which there is one a token.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from types import MappingProxyType
from typing import Any, Final

import aiohttp
import msgspec
from yarl import URL

from tanghulu.auth.credentials import TlsFiles, read_token
from tanghulu.auth.tls import client_context
from tanghulu.conductor.engines.servers import EngineServer
from tanghulu.errors import DeadlineExceeded, InvalidRequest, NodeUnavailable, Overloaded, TanghuluError
from tanghulu.rpc.http_clients import CONNECT_TIMEOUT_S, reason
from tanghulu.rpc.sockets import SILENT_HOST_S, dead_peer_options
from tanghulu.web.event_stream import EventReader

CALL_DEADLINE_S = 10.0
#: Largest answer read whole, and largest event of a stream.
MAX_ANSWER_BYTES = 64 << 20
#: Seconds for which an unused connection is kept: servers close theirs after five or more.
_KEPT_S = 2.0
#: Statuses of a server that has not begun: another may take the request.
_TRY_ELSEWHERE = (429, 503)
_SHOWN_CHARACTERS = 500
_NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})


class EngineGone(NodeUnavailable):
    """Nothing listens at the server's address."""


class EngineClient:
    """Connections to one server, as many as there are requests; made in an event loop."""

    def __init__(self, server: EngineServer, tls: TlsFiles) -> None:
        """Read the server's API key. Raises ConfigError."""
        self.server = server
        key = read_token(f"@{server.key}") if server.key else ""
        self._headers = {"host": str(server.host_port), "content-type": "application/json"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"
        is_https = server.url.startswith("https")
        self._name = server.host_port.host if is_https else None  # that of its certificate
        context = client_context(tls) if is_https else True
        # Calls have connections of their own: one that stays open is served after the server has stopped listening.
        self._calls = _session(aiohttp.TCPConnector(ssl=context, force_close=True, limit=0, socket_factory=_new_socket))
        self._streams = _session(
            aiohttp.TCPConnector(ssl=context, keepalive_timeout=_KEPT_S, limit=0, socket_factory=_new_socket)
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
        try:
            async with asyncio.timeout(deadline_s), self._send(self._calls, path, body) as response:
                data = await self._read(response)
        except TimeoutError:
            raise DeadlineExceeded(f"{self.server.url}{path} did not answer within {deadline_s:g} s") from None
        if response.status == 404 and optional:
            return b""
        if response.status != 200:
            raise self._refusal(response.status, data)
        return data

    async def events(
        self, path: str, body: dict[str, Any], headers: dict[str, str], whole: bool = False
    ) -> AsyncGenerator[list[bytes], None]:
        """Yield the data of the events of the answer to ``body``, as they come, or the ``whole`` answer as one.

        Raises Overloaded if another server may take the request at once, EngineGone, NodeUnavailable, InvalidRequest.
        """
        async with self._send(self._streams, path, body, headers) as response:
            if response.status != 200:
                raise self._refusal(response.status, await self._read(response))
            if whole:
                yield [await self._read(response)]
                return
            reader = EventReader()
            async for piece in response.content.iter_any():
                if events := reader.feed(piece):
                    yield events

    @contextlib.asynccontextmanager
    async def _send(
        self,
        session: aiohttp.ClientSession,
        path: str,
        body: dict[str, Any] | None,
        more: Mapping[str, str] = _NO_HEADERS,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        url = URL(self.server.base_url + path, encoded=True)
        content = msgspec.json.encode(body) if body is not None else None
        try:
            async with session.request(
                "GET" if content is None else "POST",
                url,
                data=content,
                headers={**self._headers, **more},
                server_hostname=self._name,
                allow_redirects=False,
            ) as response:
                yield response
        except aiohttp.ClientConnectorError as error:  # not one out of time: a busy machine's server is still there
            raise EngineGone(f"{self.server.url} refuses connections: {reason(error)}") from error
        except (aiohttp.ClientError, RuntimeError) as error:  # the latter if this client was closed meanwhile
            raise NodeUnavailable(f"{self.server.url} broke off: {reason(error)}") from error

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        pieces, size = [], 0
        async for piece in response.content.iter_any():
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
        return error_of(status, message[:_SHOWN_CHARACTERS], f"worker {self.server.id or self.server.url}")

    async def close(self) -> None:
        """Close all connections, whatever is under way on them."""
        await self._calls.close()
        await self._streams.close()


def _session(connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
    uncompressed = ("accept-encoding",)
    return aiohttp.ClientSession(
        connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar(), skip_auto_headers=uncompressed
    )


def _new_socket(where: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol, *_ = where
    made = socket.socket(family, kind, protocol)
    for option in dead_peer_options(SILENT_HOST_S):
        made.setsockopt(*option)
    return made


def error_of(status: int, message: str, server: str) -> TanghuluError:
    """Return the typed error for an engine's own: the request's fault below 500, and retryable from there."""
    text = f"{server} refused the request: {message}" if message else f"{server} answered {status}"
    if status in (401, 403):
        return NodeUnavailable(f"{text}; name the file with its API key: --engine …,key=FILE")
    if status in _TRY_ELSEWHERE:
        return Overloaded(text)
    return InvalidRequest(text) if 400 <= status < 500 and status not in (404, 408) else NodeUnavailable(text)
