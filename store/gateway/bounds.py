"""Bounds on concurrent work: ``InFlight`` counts, and ``Bounded``, a middleware, keeps requests within their places."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager

import structlog
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tanghulu.errors import Overloaded, TanghuluError
from tanghulu.store.gateway.metrics import GatewayMetrics
from tanghulu.types import format_size
from tanghulu.web.access import LOGIN
from tanghulu.web.bodies import IncomingBody, pieces
from tanghulu.web.errors import REQUEST_TIMEOUT, answer_to

_log = structlog.get_logger(__name__)
_ALWAYS = ("/health", "/live", "/ready")
#: Paths of routes that read and bound their bodies themselves.
_OWN_BODIES = ("/v1/values/", LOGIN)
#: Longest body that is not a value: some thousands of keys.
_MAX_TAKEN_BYTES = 2 << 20
#: The rest of a refused body is read and dropped up to this size, so that the answer arrives; beyond it the connection
#: ends with the answer.
_MAX_DROPPED_BYTES = 16 << 20


class InFlight:
    """The count of one kind of thing (requests, bytes, streams) in progress, with a bound. Pure."""

    def __init__(self, what: str, most: int) -> None:
        self._what = what
        self._most = most
        self.now = 0

    @contextlib.contextmanager
    def holding(self, amount: int = 1) -> Iterator[None]:
        """Count ``amount`` inside the block; raises Overloaded if there is no room for it."""
        if self.now + amount > self._most:
            raise Overloaded(f"too many {self._what} are in progress here; retry in a moment")
        self.now += amount
        try:
            yield
        finally:
            self.now -= amount

    @contextlib.contextmanager
    def holding_bytes(self, size_bytes: int) -> Iterator[None]:
        """Count ``size_bytes`` inside the block; one value above the bound is admitted when it is the only one."""
        with self.holding_what_comes() as come:
            come(size_bytes)
            yield

    @contextlib.contextmanager
    def holding_what_comes(self) -> Iterator[Callable[[int], None]]:
        """Count incoming bytes inside the block: call the yielded function with their number.

        It raises Overloaded when there is no room for them; one value above the bound has room when nothing else is in
        progress.
        """
        held = 0

        def come(num_bytes: int) -> None:
            nonlocal held
            if self.now > held and self.now + num_bytes > self._most:
                raise Overloaded(
                    f"{self._what} in progress here take {format_size(self.now)}, and {format_size(num_bytes)} more "
                    f"would exceed the limit of {format_size(self._most)}; retry in a moment"
                )
            self.now += num_bytes
            held += num_bytes

        try:
            yield come
        finally:
            self.now -= held

    def check(self) -> None:
        """Assert that no more was returned than taken."""
        assert self.now >= 0

    def __repr__(self) -> str:
        return f"InFlight({self._what}: {self.now} of {self._most})"


class Bounded:
    """An ASGI middleware that bounds and counts requests; the server disconnects clients that do not read answers.

    ``place`` counts a request with these headers. Bodies other than values are read here, up to 2 MiB, so that routes
    find them whole; before that, ``store`` must accept the caller.
    """

    def __init__(
        self,
        app: ASGIApp,
        place: Callable[[Mapping[str, str]], AbstractContextManager[None]],
        store: Callable[[Mapping[str, str]], AbstractAsyncContextManager[object]],
        stall_s: float,
        metrics: GatewayMetrics,
    ) -> None:
        self._app = app
        self._place = place
        self._store = store
        self._stall_s = stall_s
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request within the bounds."""
        if scope["type"] != "http" or scope["path"] in _ALWAYS:
            await self._app(scope, receive, send)
            return
        began_s = time.monotonic()
        exchange, headers = _Exchange(scope, receive, send, self._stall_s), Headers(scope=scope)
        try:
            with self._place(headers):
                if not scope["path"].startswith(_OWN_BODIES):
                    if exchange.has_body:
                        async with self._store(headers):
                            pass
                    await exchange.take_body()
                await self._app(scope, exchange.receive, exchange.send)
        except TanghuluError as error:  # errors of the application are answered inside
            await answer_to(error)(scope, exchange.receive, exchange.send)
        except ClientDisconnect:
            pass  # no client is left to answer
        self._metrics.note(scope, exchange.status, time.monotonic() - began_s)


class _Exchange:
    """The incoming body of one request, with a time limit, and the outgoing answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, stall_s: float) -> None:
        self.status = 0
        self._receive = receive
        self._send = send
        self._body = IncomingBody(scope, receive, stall_s)
        self._taken: Message | None = None  # the whole body, to be passed on

    @property
    def has_body(self) -> bool:
        """Whether some of the body is still to come."""
        return self._body.num_left > 0

    async def take_body(self) -> None:
        """Read the whole body; raises BodyTooLarge, BodyTooSlow, ClientDisconnect."""
        body = b"".join([piece async for piece in pieces(self._body, _MAX_TAKEN_BYTES)])
        self._taken = {"type": "http.request", "body": body, "more_body": False}

    async def receive(self) -> Message:
        """Return the next piece of the body; behind its end, the server's messages.

        Raises BodyTooSlow when no piece arrives, or too little over a time.
        """
        if self._taken is not None:
            message, self._taken = self._taken, None
            return message
        return await (self._receive() if self._body.is_complete else self._body.receive())

    async def send(self, message: Message) -> None:
        """Send the next piece of the answer."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self._body.num_left > _MAX_DROPPED_BYTES and self.status != REQUEST_TIMEOUT:  # it closes by itself
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        await self._send(message)


async def read_into(receive: Receive, body: memoryview, come: Callable[[int], None]) -> None:
    """Fill ``body`` with a request's body of exactly this size, and report each piece to ``come``.

    Raises ClientDisconnect when the client disconnects, and any error of ``come``.

    The server enforces the size: neither less nor more than Content-Length arrives.
    """
    filled, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        piece, more = message.get("body", b""), message.get("more_body", False)
        come(len(piece))
        body[filled : filled + len(piece)] = piece
        filled += len(piece)
    assert filled == len(body), "the server let through a body of another length"
