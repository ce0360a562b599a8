"""The parts shared by both routers that relay requests: the client, the retry rules, the forwarded headers.

Answers may take any time, so no deadline ends them. They end if the server can no longer be reached: its host is silent
according to the kernel (seconds), or its process hangs. A server that has sent nothing for a quarter of ``silence_s``
is probed with /health over another connection, and given up if it does not answer that within the rest of the time
either. Any answer counts: servers of other engines need not support /health.

Example, with 10 s: a conductor sent its last token at 20.0 s. At 22.5 it is probed, and answers: it is computing. At
25.0 it is probed again, but has stopped meanwhile: at 32.5 all its answers end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import httpx
import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tanghulu.auth.credentials import NO_TLS, TlsFiles
from tanghulu.conductor.http.reply import disconnected, stream_error
from tanghulu.errors import NodeUnavailable
from tanghulu.rpc.http_clients import new_client, reason
from tanghulu.runtime.tasks import cancelled

_log = structlog.get_logger(__name__)
T = TypeVar("T")

#: Default time for which a server may send nothing at all.
SILENCE_S = 10.0
#: Errors of requests to a server that is unreachable or has an invalid address.
UNREACHABLE = (httpx.HTTPError, httpx.InvalidURL)
#: A server that answers with one of these has not begun: the request may go to another.
TRY_ELSEWHERE = (429, 502, 503, 529)
#: Hop-by-hop headers, which the next hop sets itself.
_OF_ONE_HOP = frozenset(("connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"))
_OF_REQUESTS = _OF_ONE_HOP | {"accept-encoding", "content-length", "host"}


class RelayClient:
    """Sends requests to servers, for answers of any length, over as many connections as there are requests."""

    def __init__(self, silence_s: float = SILENCE_S, tls: TlsFiles = NO_TLS) -> None:
        """Create a client; ``tls`` is for https."""
        self._silence_s = silence_s
        self._http = new_client(tls, 256)
        self._probes: dict[httpx.URL, asyncio.Task[bool]] = {}  # requests for /health in progress
        self._closing: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Close all connections."""
        await cancelled(*self._probes.values())
        await asyncio.gather(*self._closing, return_exceptions=True)
        await self._http.aclose()

    def request(
        self, method: str, url: httpx.URL | str, body: bytes, headers: Mapping[str, str], name: str = ""
    ) -> httpx.Request:
        """Build a request; ``name`` is that of the server, if ``url`` has its IP address."""
        more = {"sni_hostname": name} if name else {}
        return self._http.build_request(method, url, content=body, headers=headers, extensions=more)

    async def send(self, request: httpx.Request) -> httpx.Response:
        """Return the answer as soon as it begins; ``pieces`` has the rest. Raises httpx.HTTPError, also if silent."""
        return await self._unless_silent(request, self._http.send(request, stream=True))

    async def pieces(self, response: httpx.Response, server: str) -> AsyncIterator[bytes]:
        """Yield the bytes of an answer as they arrive. Raises NodeUnavailable if ``server`` ends early or is silent."""
        try:
            async with contextlib.aclosing(cast(AsyncGenerator[bytes], response.aiter_raw())) as pieces:
                while (piece := await self._unless_silent(response.request, anext(pieces, None))) is not None:
                    yield piece
        except httpx.HTTPError as error:
            _log.warning("relay.answer_broke", url=str(response.url), error=reason(error))
            raise NodeUnavailable(f"{server} broke off its answer: {reason(error)}") from error

    def end(self, response: httpx.Response) -> None:
        """Close the connection of an abandoned answer, also if its reader was cancelled."""
        closing = asyncio.create_task(response.aclose())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def exchange(
        self, method: str, url: str, body: bytes, headers: Mapping[str, str], deadline_s: float
    ) -> httpx.Response:
        """Return a whole answer that should come at once. Raises httpx.HTTPError."""
        return await self._http.request(method, url, content=body, headers=headers, timeout=deadline_s)

    async def is_alive(self, url: str, deadline_s: float) -> bool:
        """Return whether the server of ``url`` answers anything within ``deadline_s``."""
        return await self._is_alive(self.request("GET", url, b"", {}), deadline_s)

    async def _unless_silent(self, request: httpx.Request, answering: Awaitable[T]) -> T:
        """Return the result of ``answering``; ReadTimeout if the server of ``request`` falls silent."""
        task, look_s = asyncio.ensure_future(answering), self._silence_s / 4
        try:
            while not (await asyncio.wait((task,), timeout=look_s))[0]:
                if not await self._is_alive(request, self._silence_s - look_s) and not task.done():
                    raise httpx.ReadTimeout(f"it has answered nothing for {self._silence_s:g} s", request=request)
            return task.result()
        finally:
            await cancelled(task)

    async def _is_alive(self, request: httpx.Request, deadline_s: float) -> bool:
        """Probe /health of the server of ``request``, once for all concurrent callers."""
        url = request.url.copy_with(path="/health", query=None)
        task = self._probes.get(url)
        if task is None:
            task = self._probes[url] = asyncio.create_task(self._probe(request, url, deadline_s))
            task.add_done_callback(lambda _: self._probes.pop(url, None))
        return await asyncio.shield(task)

    async def _probe(self, request: httpx.Request, url: httpx.URL, deadline_s: float) -> bool:
        headers = {"host": request.headers["host"]}
        more = {name: value for name, value in request.extensions.items() if name == "sni_hostname"}
        try:
            async with asyncio.timeout(deadline_s):
                await self._http.get(url, headers=headers, extensions=more)
        except (*UNREACHABLE, TimeoutError):
            return False
        return True


@dataclass(frozen=True, slots=True)
class RelayedAnswer:
    """An answer that has begun. ``pieces`` raise NodeUnavailable if the server breaks off.

    ``end`` must be called at the end, however far the pieces were read.
    """

    status: int
    headers: Mapping[str, str]
    pieces: AsyncIterator[bytes]
    end: Callable[[], None]


class Relay(Response):
    """Waits for ``answering``, passes the answer on and ends it; its typed errors are answered like any other.

    When the client hangs up the connection to the server is closed, so that the server aborts the request. When the
    server breaks off, a stream of events ends with an error event, and any other answer without its end.
    """

    def __init__(self, answering: Coroutine[Any, Any, RelayedAnswer]) -> None:
        super().__init__()
        self._answering = answering
        self._answer: RelayedAnswer | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.create_task(disconnected(receive))
        work = asyncio.create_task(self._work(scope, send))
        try:
            await asyncio.wait({watch, work}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancelled(watch, work)
            if self._answer is not None:
                self._answer.end()
        if not work.cancelled():
            work.result()

    async def _work(self, scope: Scope, send: Send) -> None:
        answer = self._answer = await self._answering
        head = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers.items()]
        await send({"type": "http.response.start", "status": answer.status, "headers": head})
        try:
            async for piece in answer.pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except NodeUnavailable as error:
            if not answer.headers.get("content-type", "").startswith("text/event-stream"):
                raise
            last = stream_error(error, scope)
            await send({"type": "http.response.body", "body": last, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def request_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of a client's request to forward to the server."""
    return {name: value for name, value in headers.items() if name.lower() not in _OF_REQUESTS}


def answer_headers(response: httpx.Response) -> dict[str, str]:
    """Return the headers of a server's answer to return to the client."""
    return {name: value for name, value in response.headers.items() if name.lower() not in _OF_ONE_HOP}
