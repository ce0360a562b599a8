"""HTTP to one engine server: whole answers within a deadline, streams without one, errors typed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import httpx
import msgspec

from tanghulu.auth.credentials import TlsFiles, read_token
from tanghulu.conductor.engines.servers import EngineServer
from tanghulu.errors import DeadlineExceeded, InvalidRequest, NodeUnavailable, Overloaded, TanghuluError
from tanghulu.rpc.http_clients import new_client, reason
from tanghulu.web.event_stream import EventReader

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
        self._extensions = {"sni_hostname": server.host_port.host}
        self._http = new_client(tls, 64, 2.0)

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
        headers = {"connection": "close"}
        try:
            async with asyncio.timeout(deadline_s), self._send(path, body, headers) as response:
                data = await _read(response)
        except TimeoutError:
            raise DeadlineExceeded(f"{self.server.url}{path} did not answer within {deadline_s:g} s") from None
        if response.status_code == 404 and optional:
            return b""
        if response.status_code != 200:
            raise self._refusal(response.status_code, data)
        return data

    async def events(
        self, path: str, body: dict[str, Any], headers: dict[str, str], whole: bool = False
    ) -> AsyncGenerator[bytes, None]:
        """Yield the data of each event of the answer to ``body``, or the ``whole`` answer as one.

        Raises Overloaded if another server may take the request at once, EngineGone, NodeUnavailable, InvalidRequest.
        """
        async with self._send(path, body, headers) as response:
            if response.status_code >= 400:
                raise self._refusal(response.status_code, await _read(response))
            if whole:
                yield await _read(response)
                return
            reader = EventReader()
            async for piece in response.aiter_raw():
                for data in reader.feed(piece):
                    yield data

    @contextlib.asynccontextmanager
    async def _send(
        self, path: str, body: dict[str, Any] | None, headers: dict[str, str]
    ) -> AsyncIterator[httpx.Response]:
        url, content = self.server.base_url + path, msgspec.json.encode(body) if body is not None else None
        method = "GET" if content is None else "POST"
        request = self._http.build_request(
            method, url, content=content, headers={**self._headers, **headers}, extensions=self._extensions
        )
        try:
            response = await self._http.send(request, stream=True)
            try:
                yield response
            finally:
                await response.aclose()
        except httpx.ConnectError as error:
            raise EngineGone(f"{self.server.url} refuses connections: {reason(error)}") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise NodeUnavailable(f"{self.server.url} broke off: {reason(error)}") from error

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
        await self._http.aclose()


def error_of(status: int, message: str, server: str) -> TanghuluError:
    """Return the typed error for an engine's own: the request's fault below 500, and retryable from there."""
    text = f"worker {server} refused the request: {message}" if message else f"worker {server} answered {status}"
    if status in (401, 403):
        return NodeUnavailable(f"{text}; name the file with its API key: --engine …,key=FILE")
    if status in _TRY_ELSEWHERE:
        return Overloaded(text)
    return InvalidRequest(text) if 400 <= status < 500 and status not in (404, 408) else NodeUnavailable(text)


async def _read(response: httpx.Response) -> bytes:
    pieces, size = [], 0
    async for piece in response.aiter_bytes():
        size += len(piece)
        if size > MAX_ANSWER_BYTES:
            raise NodeUnavailable(f"{response.url} answered more than {MAX_ANSWER_BYTES >> 20} MiB")
        pieces.append(piece)
    return b"".join(pieces)
