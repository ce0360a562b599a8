"""Reading bodies and sending answers: checked bodies, and replies that notice when the client hangs up.

An answer that waits for tokens runs beside a task that waits for the client's disconnect; when that comes first, the
call is aborted, the workers are told, and the reply ends by itself. So nothing is cancelled from outside.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tanghulu.conductor.http.generation import GenerationCall
from tanghulu.conductor.http.json_marks import check_marks
from tanghulu.conductor.http.schema import RoutedBody
from tanghulu.conductor.http.service import Service
from tanghulu.conductor.text.preparing import INLINE_BYTES, in_thread
from tanghulu.errors import TanghuluError
from tanghulu.web.bodies import DEADLINE_S, STALL_S, IncomingBody, pieces
from tanghulu.web.errors import BadField, body_of, from_validation, log_failure

B = TypeVar("B", bound=BaseModel)
_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The whole body. Raises BodyTooLarge as soon as it is known to be longer than ``limit_bytes``, and BodyTooSlow."""
    incoming = IncomingBody(request.scope, request.receive, STALL_S, DEADLINE_S)
    return b"".join([piece async for piece in pieces(incoming, limit_bytes)])


@contextlib.asynccontextmanager
async def reading(request: Request, service: Service, model: type[B]) -> AsyncIterator[B]:
    """The body as ``model``; it has its place in the room for bodies until the block ends, so tokenise inside.

    Raises BadField, ContextLengthExceeded, BodyTooLarge, BodyTooSlow, BodiesFull.
    """
    async with service.bodies.reading(request.scope, request.receive) as body:
        with body.view() as view:
            parsed = await parse_large(model, view, service.most_string_bytes)
        body.clear()
        if isinstance(parsed, RoutedBody):
            parsed.came_from(_sender(request))
        yield parsed


def _sender(request: Request) -> str:
    """Who sent a request: its key, or its address where it has none. The key itself is not kept."""
    key = request.headers.get("authorization", "")
    if key:
        return "key " + hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
    return f"address {request.client.host}" if request.client is not None else ""


async def parse_large(model: type[B], body: bytes | memoryview, most_string_bytes: float) -> B:
    """``body`` as ``model``, parsed in a thread where it is long. Raises BadField, ContextLengthExceeded."""
    if len(body) <= INLINE_BYTES:
        return parse(model, body)
    await in_thread(check_marks, body, most_string_bytes)
    return await in_thread(parse, model, body)


def parse(model: type[B], body: bytes | memoryview) -> B:
    """``body`` as ``model``. Raises BadField."""
    try:
        return model.model_validate(msgspec.json.decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadField(f"the body is not JSON: {error}") from None
    except ValidationError as error:
        raise from_validation(error) from None


def event(payload: str) -> bytes:
    """One server-sent event."""
    return f"data: {payload}\n\n".encode()


def dumps(value: Any) -> str:
    """JSON as compact as OpenAI's."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


async def hung_up(receive: Receive) -> None:
    """Wait until the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


class _Watched(Response, ABC):
    """A reply that watches for the client's disconnect; calls ``done`` when it is over."""

    def __init__(self, call: GenerationCall, done: Callable[[GenerationCall], None]) -> None:
        super().__init__()
        self._call = call
        self._done = done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["request_id"] = self._call.id
        watch = asyncio.ensure_future(hung_up(receive))
        watch.add_done_callback(lambda _: self._call.abort())
        try:
            await self.answer(scope, send)
        finally:
            watch.cancel()
            self._call.abort()
            self._done(self._call)

    @abstractmethod
    async def answer(self, scope: Scope, send: Send) -> None:
        """Produce the answer."""


class EventStream(_Watched):
    """Server-sent events. An error before the first one becomes an HTTP error, a later one an event.

    ``failed`` says what stands beside the error in that event: how the sequences ended that had not.
    """

    def __init__(
        self,
        call: GenerationCall,
        done: Callable[[GenerationCall], None],
        chunks: AsyncGenerator[bytes, None],
        failed: Callable[[TanghuluError], dict[str, Any]],
    ) -> None:
        super().__init__(call, done)
        self._chunks = chunks
        self._failed = failed

    async def answer(self, scope: Scope, send: Send) -> None:
        try:
            piece = await anext(self._chunks)
            await send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS})
            try:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                async for piece in self._chunks:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            except TanghuluError as error:
                log_failure(error, scope["path"], self._call.id)
                last = event(dumps({**body_of(error), **self._failed(error)})) + DONE
                await send({"type": "http.response.body", "body": last, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._chunks.aclose()


class JsonWhenDone(_Watched):
    """A JSON body that is computed while the client waits."""

    def __init__(
        self, call: GenerationCall, done: Callable[[GenerationCall], None], compute: Callable[[], Awaitable[Any]]
    ) -> None:
        super().__init__(call, done)
        self._compute = compute

    async def answer(self, scope: Scope, send: Send) -> None:
        """Compute, then send."""
        body = dumps(await self._compute()).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})
