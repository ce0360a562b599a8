"""What both routers share that pass a request on: the client, whom to try next, which headers go through.

Answers may take any time, so no deadline ends them. What ends them is a server that cannot be reached any more: a host
that the kernel finds silent (seconds), or a process that stands still. A server that has sent nothing for a quarter of
``silence_s`` is asked for /health over another connection, and given up if it does not answer that either in the rest
of the time. Any answer counts: servers of other engines need not know /health.

Example, with 10 s: a conductor has sent its last token at 20.0 s. At 22.5 it is asked, and answers: it computes. At
25.0 it is asked again, and has been stopped meanwhile: at 32.5 all its answers are over.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import httpx
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tanghulu.auth.credentials import NO_TLS, TlsFiles
from tanghulu.auth.tls import client_context
from tanghulu.conductor.http.reply import DONE, dumps, event, hung_up
from tanghulu.errors import NodeUnavailable
from tanghulu.rpc.pacing import SILENT_HOST_S, dead_peer_options
from tanghulu.runtime.tasks import cancelled
from tanghulu.web.errors import body_of

T = TypeVar("T")

CONNECT_TIMEOUT_S = 2.0
#: How long a server may answer nothing at all, by default.
SILENCE_S = 10.0
#: Errors of requests to a server that cannot be reached, or whose address is none.
UNREACHABLE = (httpx.HTTPError, httpx.InvalidURL)
#: A server that answers with one of these has not begun: the request may go to another.
TRY_ELSEWHERE = (429, 502, 503)
#: Headers of one hop, which the next one makes itself.
_OF_ONE_HOP = frozenset(("connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"))
_OF_REQUESTS = _OF_ONE_HOP | {"accept-encoding", "content-length", "host"}


class RelayClient:
    """Sends requests to servers, for answers of any length, over as many connections as there are requests."""

    def __init__(self, silence_s: float = SILENCE_S, tls: TlsFiles = NO_TLS) -> None:
        """``tls`` is for https."""
        self._silence_s = silence_s
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        options = dead_peer_options(SILENT_HOST_S)
        verify = client_context(tls)
        transport = httpx.AsyncHTTPTransport(verify=verify, limits=limits, trust_env=False, socket_options=options)
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
        self._http = httpx.AsyncClient(timeout=timeout, transport=transport, trust_env=False)
        self._probes: dict[httpx.URL, asyncio.Task[bool]] = {}  # requests for /health under way
        self._closing: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Close all connections."""
        await cancelled(*self._probes.values())
        await asyncio.gather(*self._closing, return_exceptions=True)
        await self._http.aclose()

    def request(
        self, method: str, url: httpx.URL | str, body: bytes, headers: Mapping[str, str], name: str = ""
    ) -> httpx.Request:
        """A request to be sent; ``name`` of the server, where ``url`` has its IP address."""
        more = {"sni_hostname": name} if name else {}
        return self._http.build_request(method, url, content=body, headers=headers, extensions=more)

    async def send(self, request: httpx.Request) -> httpx.Response:
        """The answer as soon as it begins; ``pieces`` has the rest. Raises httpx.HTTPError, also of a silent server."""
        return await self._unless_silent(request, self._http.send(request, stream=True))

    async def pieces(self, response: httpx.Response) -> AsyncIterator[bytes]:
        """The bytes of an answer as they come. Raises httpx.HTTPError, also if its server falls silent."""
        async with contextlib.aclosing(cast(AsyncGenerator[bytes], response.aiter_raw())) as pieces:
            while (piece := await self._unless_silent(response.request, anext(pieces, None))) is not None:
                yield piece

    def end(self, response: httpx.Response) -> None:
        """Close the connection of an answer that nobody reads on, also where its reader was cancelled."""
        closing = asyncio.create_task(response.aclose())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def exchange(
        self, method: str, url: str, body: bytes, headers: Mapping[str, str], deadline_s: float
    ) -> httpx.Response:
        """A whole answer that should come at once. Raises httpx.HTTPError."""
        return await self._http.request(method, url, content=body, headers=headers, timeout=deadline_s)

    async def is_alive(self, url: str, deadline_s: float) -> bool:
        """Return whether the server of ``url`` answers anything within ``deadline_s``."""
        return await self._is_alive(self.request("GET", url, b"", {}), deadline_s)

    async def _unless_silent(self, request: httpx.Request, answering: Awaitable[T]) -> T:
        """The result of ``answering``, which waits for the server of ``request``; ReadTimeout if that is silent."""
        task, look_s = asyncio.ensure_future(answering), self._silence_s / 4
        try:
            while not (await asyncio.wait((task,), timeout=look_s))[0]:
                if not await self._is_alive(request, self._silence_s - look_s) and not task.done():
                    raise httpx.ReadTimeout(f"it has answered nothing for {self._silence_s:g} s", request=request)
            return task.result()
        finally:
            await cancelled(task)

    async def _is_alive(self, request: httpx.Request, deadline_s: float) -> bool:
        """Ask for /health where ``request`` goes, once for all who want to know it now."""
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
    """An answer that has begun. ``pieces`` raise NodeUnavailable where the server breaks off.

    ``end`` must be called in the end, however far the pieces were read.
    """

    status: int
    headers: Mapping[str, str]
    pieces: AsyncIterator[bytes]
    end: Callable[[], None]


class Relay(Response):
    """Waits for ``answering`` and passes the answer on, and ends it; its typed errors are answered as any other.

    When the client hangs up the connection to the server is closed, so that the server aborts the request. When the
    server breaks off, a stream of events ends with an error event, and any other answer without its end.
    """

    def __init__(self, answering: Coroutine[Any, Any, RelayedAnswer]) -> None:
        super().__init__()
        self._answering = answering
        self._answer: RelayedAnswer | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.create_task(hung_up(receive))
        work = asyncio.create_task(self._work(send))
        try:
            await asyncio.wait({watch, work}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancelled(watch, work)
            if self._answer is not None:
                self._answer.end()
        if not work.cancelled():
            work.result()

    async def _work(self, send: Send) -> None:
        answer = self._answer = await self._answering
        head = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers.items()]
        await send({"type": "http.response.start", "status": answer.status, "headers": head})
        try:
            async for piece in answer.pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except NodeUnavailable as error:
            if not answer.headers.get("content-type", "").startswith("text/event-stream"):
                raise
            last = event(dumps(body_of(error))) + DONE
            await send({"type": "http.response.body", "body": last, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def request_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers of a client's request that go on to the server."""
    return {name: value for name, value in headers.items() if name.lower() not in _OF_REQUESTS}


def answer_headers(response: httpx.Response) -> dict[str, str]:
    """The headers of a server's answer that go back to the client."""
    return {name: value for name, value in response.headers.items() if name.lower() not in _OF_ONE_HOP}


def reason(error: Exception) -> str:
    """The text of ``error``, for which httpx often has none."""
    return str(error) or type(error).__name__
