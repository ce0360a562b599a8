"""How much is under way at one time, and what happens beyond it. ``InFlight`` decides; ``Bounded`` stands in front."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator

import structlog
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tanghulu.errors import Overloaded
from tanghulu.store.http.metrics import GatewayMetrics
from tanghulu.types import format_size
from tanghulu.web.errors import REQUEST_TIMEOUT, BodyTooSlow, answer_to

_log = structlog.get_logger(__name__)
_ALWAYS = ("/health", "/live")
#: What is left of a refused body is read and dropped up to this size, so that the answer arrives; beyond it the
#: connection ends with the answer.
_MAX_DROPPED_BYTES = 16 << 20


class InFlight:
    """Counts of one kind of thing (requests, bytes, streams), with a bound. Pure."""

    def __init__(self, what: str, most: int) -> None:
        self._what = what
        self._most = most
        self.now = 0

    @contextlib.contextmanager
    def holding(self, amount: int = 1) -> Iterator[None]:
        """Count ``amount`` inside the block; raises Overloaded if there is no room for it."""
        if self.now + amount > self._most:
            raise Overloaded(f"{self._what} under way here have reached their bound; try again in a moment")
        self.now += amount
        try:
            yield
        finally:
            self.now -= amount

    @contextlib.contextmanager
    def holding_bytes(self, size_bytes: int) -> Iterator[None]:
        """The same with a message about sizes."""
        if self.now + size_bytes > self._most:
            raise Overloaded(
                f"{self._what} under way here have {format_size(self.now)}, and {format_size(size_bytes)} more would "
                f"be above the bound of {format_size(self._most)}; try again in a moment"
            )
        with self.holding(size_bytes):
            yield

    def check(self) -> None:
        """Assert the bound."""
        assert 0 <= self.now <= self._most

    def __repr__(self) -> str:
        return f"InFlight({self._what}: {self.now} of {self._most})"


class _Stalled(Exception):
    """The client takes nothing any more."""


class Bounded:
    """An ASGI middleware that bounds and counts requests, and hangs up on clients that do not take their answer."""

    def __init__(self, app: ASGIApp, requests: InFlight, stall_s: float, metrics: GatewayMetrics) -> None:
        self._app = app
        self._requests = requests
        self._stall_s = stall_s
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http" or scope["path"] in _ALWAYS:
            await self._app(scope, receive, send)
            return
        began_s = time.monotonic()
        exchange = _Exchange(scope, receive, send, self._stall_s)
        try:
            with self._requests.holding():
                await self._app(scope, exchange.receive, exchange.send)
        except Overloaded as error:  # of this bound: those of the application are answered inside
            await answer_to(error)(scope, exchange.receive, exchange.send)
        except _Stalled:  # the server closes a connection whose answer was not sent to its end
            _log.warning("gateway.stalled", path=scope["path"], stall_s=self._stall_s)
        self._metrics.note(scope, exchange.status, time.monotonic() - began_s)


class _Exchange:
    """One request's body coming and its answer going."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, stall_s: float) -> None:
        self.status = 0
        self._receive = receive
        self._send = send
        self._stall_s = stall_s
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"0")
        self._left = int(length) if length.isdigit() else 0
        if b"transfer-encoding" in headers:
            self._left = _MAX_DROPPED_BYTES + 1  # nobody knows

    async def receive(self) -> Message:
        """The next piece of the body."""
        message = await self._receive()
        if message["type"] == "http.request":
            self._left -= len(message.get("body", b""))
            if not message.get("more_body", False):
                self._left = 0
        return message

    async def send(self, message: Message) -> None:
        """The next piece of the answer; raises _Stalled when it does not go."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self._left > _MAX_DROPPED_BYTES or (self._left and self.status == REQUEST_TIMEOUT):
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        try:
            async with asyncio.timeout(self._stall_s):
                await self._send(message)
        except TimeoutError:
            raise _Stalled from None


async def read_into(receive: Receive, body: memoryview, stall_s: float) -> None:
    """Fill ``body`` with a request's body of just this size.

    Raises BodyTooSlow when nothing comes for ``stall_s``, ClientDisconnect at a client's end. The server sees to the
    size: neither less nor more than Content-Length comes.
    """
    filled, more = 0, True
    while more:
        try:
            async with asyncio.timeout(stall_s):
                message = await receive()
        except TimeoutError:
            raise BodyTooSlow(f"{filled} of {len(body)} bytes came, then none for {stall_s:g} s") from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        piece, more = message.get("body", b""), message.get("more_body", False)
        body[filled : filled + len(piece)] = piece
        filled += len(piece)
    assert filled == len(body), "the server let through a body of another length"
