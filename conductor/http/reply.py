"""Reading bodies and sending answers: validated bodies, and replies that notice a client's disconnect.

An answer waiting for tokens runs alongside a task waiting for the client's disconnect; if the disconnect comes first,
the call is aborted at its workers, and the reply ends by itself. So nothing is cancelled from outside.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from abc import ABC, abstractmethod
from codecs import BOM_UTF8
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
from fastapi import Request
from pydantic import ValidationError
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tanghulu.conductor.http.envelope import CLIENT_CLOSED_REQUEST
from tanghulu.conductor.inference.body import Body
from tanghulu.conductor.inference.generation import GenerationCall, TextDelta
from tanghulu.conductor.inference.json_marks import MARK_BYTES, check_marks
from tanghulu.conductor.inference.schema import RoutedBody
from tanghulu.conductor.inference.service import Service, UnknownFields
from tanghulu.conductor.stories.origin import Origin, sender_of
from tanghulu.conductor.text.preparing import INLINE_BYTES, in_thread, made_ready
from tanghulu.errors import InvalidRequest, TanghuluError
from tanghulu.web.bodies import DEADLINE_S, STALL_S, IncomingBody, pieces
from tanghulu.web.errors import (
    BadField,
    WrongContentType,
    anthropic_body,
    body_of,
    from_validation,
    is_anthropic,
    log_failure,
    status_of,
)

#: Names of the prompt in the code shared by all APIs.
_PROMPT_FIELDS = ("prompt", "messages")
B = TypeVar("B", bound=Body)
_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """Return the whole body. Raises BodyTooLarge once it is known to exceed ``limit_bytes``, and BodyTooSlow."""
    incoming = IncomingBody(request.scope, request.receive, STALL_S, DEADLINE_S)
    return b"".join([piece async for piece in pieces(incoming, limit_bytes)])


@contextlib.asynccontextmanager
async def reading(request: Request, service: Service, model: type[B]) -> AsyncIterator[B]:
    """Parse the body as ``model``; it keeps its place in the room for bodies until the block ends, so tokenise inside.

    Raises BadField, ContextLengthExceeded, BodyTooLarge, BodyTooSlow, BodiesFull, WrongContentType.
    """
    check_content_type(request)
    async with service.bodies.reading(request.scope, request.receive) as body:
        with contextlib.ExitStack() as held:
            with body.view() as view:
                parsed = await parse_held(model, view, service, held)
            body.clear()
            if parsed.unknown:
                if service.unknown_fields is UnknownFields.REFUSE:
                    raise parsed.refusal()
                request.scope.setdefault("state", {})["warning"] = parsed.warning()
            if isinstance(parsed, RoutedBody):
                note_sender(parsed, request)
            with _prompt_named(parsed):
                yield parsed


@contextlib.contextmanager
def _prompt_named(body: Body) -> Iterator[None]:
    """Have an error about the prompt name the field of ``body`` that contains it."""
    try:
        yield
    except InvalidRequest as error:
        if error.param is None or error.param in _PROMPT_FIELDS:
            error.param = body.prompt_field
        raise


def note_sender(body: RoutedBody, request: Request) -> None:
    """Record the owner of ``body``, and the headers that stand for fields of it. Raises InvalidRequest."""
    state = request.scope.get("state", {})
    origin = None
    if "trace" in state:
        origin = Origin(state["x_request_id"], state["trace"], state["began_s"], time.monotonic())
    body.came_from(_sender(request), state.get("api_key"), origin)
    wanted = request.headers.get("x-explain-cache", "0")
    if wanted not in ("0", "1"):
        raise InvalidRequest(f"header x-explain-cache is {wanted[:64]!r}; send 1 for an explanation, or leave it out")
    if wanted == "1":
        body.explain_cache = True


def _sender(request: Request) -> str:
    shown = request.headers.get("authorization") or request.headers.get("x-api-key", "")
    return sender_of(shown, request.client.host if request.client is not None else "")


def check_content_type(request: Request) -> None:
    """Reject a body declared as other than plain JSON. Raises WrongContentType."""
    coding = request.headers.get("content-encoding", "").strip().lower()
    if coding not in ("", "identity"):
        raise WrongContentType(f"content-encoding {coding[:64]!r} is not supported; send the body uncompressed")
    given = request.headers.get("content-type", "")
    kind = given.partition(";")[0].strip().lower()
    if kind and kind != "application/json" and not kind.endswith("+json"):
        raise WrongContentType(f"content-type {kind[:64]!r} is not supported; send JSON as application/json")


async def parse_held(model: type[B], body: bytes | memoryview, service: Service, held: contextlib.ExitStack) -> B:
    """Parse ``body`` as ``model``, in a thread if it is long; its values have room until the end of ``held``.

    Raises BadField, ContextLengthExceeded, BodiesFull.
    """
    is_large = len(body) > INLINE_BYTES
    marks = await made_ready(is_large, check_marks, body, service.most_string_bytes, model.max_marks)
    held.enter_context(service.values.holding(marks * MARK_BYTES))
    parsed = await made_ready(is_large, parse_fields, model, body)
    if is_large:
        parsed.set_large()
    return parsed


def parse_fields(model: type[B], body: bytes | memoryview) -> B:
    """Parse ``body`` as ``model``, and drop foreign fields. Raises BadField."""
    plain = body[len(BOM_UTF8) :] if body[: len(BOM_UTF8)] == BOM_UTF8 else body
    try:
        given = msgspec.json.decode(plain)
        if not isinstance(given, dict):
            raise BadField("the body is not a JSON object")
        parsed = model.model_validate(given)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadField(f"the body is not JSON: {error}") from None
    except ValidationError as error:
        raise from_validation(error) from None
    parsed.drop_foreign()
    return parsed


def event(payload: str) -> bytes:
    """Format one server-sent event."""
    return f"data: {payload}\n\n".encode()


_encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
#: Values encoded at a time in a long list.
_SLICE_VALUES = 256


#: Characters that JSON leaves as they are, but many clients treat as the end of a line of a stream.
_LINE_ENDS = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def dumps(value: Any) -> str:
    """Return JSON as compact as OpenAI's, without characters that any client treats as the end of a line."""
    return in_lines(_encoder.encode(value))


def in_lines(text: str) -> str:
    """Return the JSON ``text`` with all line-ending characters escaped, except those between events of a stream."""
    if not text.isascii():
        for character, escaped in _LINE_ENDS.items():  # ``translate`` would look up every single character
            text = text.replace(character, escaped)
    return text


def dumps_large(value: Any) -> bytes:
    """Encode JSON as ``dumps`` does, but in slices, for use in a thread: an encoder holds the interpreter lock."""
    if not isinstance(value, dict | list):
        return dumps(value).encode()
    if isinstance(value, dict):
        parts = [b"%b:%b" % (dumps(name).encode(), dumps_large(inner)) for name, inner in value.items()]
        return b"{%b}" % b",".join(parts)
    if len(value) <= _SLICE_VALUES:
        return b"[%b]" % b",".join([dumps_large(inner) for inner in value])
    slices = [value[start : start + _SLICE_VALUES] for start in range(0, len(value), _SLICE_VALUES)]
    return b"[%b]" % b",".join([dumps(each)[1:-1].encode() for each in slices])


async def disconnected(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


class _Watched(Response, ABC):
    """A reply with an answer that watches for the client's disconnect; calls ``done`` at its end."""

    def __init__(self, call: GenerationCall, done: Callable[[GenerationCall], None], answer: Answer) -> None:
        super().__init__()
        self._call, self._done, self._answer = call, done, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.setdefault("state", {})
        state |= {"request_id": self._call.id, "model": self._call.model.card.model}
        watch = asyncio.ensure_future(disconnected(receive))
        watch.add_done_callback(lambda _: self._call.abort())
        try:
            await self._reply(scope, send)
        finally:
            if watch.done():
                state["ended"] = CLIENT_CLOSED_REQUEST
            watch.cancel()
            self._call.abort()
            self._done(self._call)

    @abstractmethod
    async def _reply(self, scope: Scope, send: Send) -> None:
        """Send the answer."""


def last_events(error: TanghuluError, **beside: Any) -> bytes:
    """Return the end of a stream cut short by ``error``; ``beside`` has the ends of the unfinished sequences."""
    return event(dumps({**body_of(error), **beside})) + DONE


def named_event(payload: Mapping[str, Any]) -> bytes:
    """Format one server-sent event with its type as its name."""
    return f"event: {payload['type']}\n".encode() + event(dumps(payload))


def stream_error(error: TanghuluError, scope: Scope) -> bytes:
    """Return the end of a stream cut short by ``error``, in the shape of the API of the route."""
    return named_event(anthropic_body(error, scope)) if is_anthropic(scope) else last_events(error)


class Answer(Protocol):
    """The output of a call's sequences in the form of one API: server-sent events, or the whole."""

    def take(self, index: int, delta: TextDelta) -> bytes:
        """Return the events for the next delta of a sequence; may be empty."""

    def end(self) -> bytes:
        """Return the events after the last delta of all sequences."""

    def failed(self, error: TanghuluError) -> bytes:
        """Return the last events of a stream cut short by an error."""

    async def whole(self) -> Any:
        """Return the whole answer, once it has ended: JSON's types, or bytes of JSON."""


class EventStream(_Watched):
    """Server-sent events; those ready at the same time are sent in one write.

    An error before the first one becomes an HTTP error, a later one an event.
    """

    async def _reply(self, scope: Scope, send: Send) -> None:
        piece = await self._next()
        await send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS})
        try:
            while not self._call.ended:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                piece = await self._next()
        except TanghuluError as error:
            log_failure(error, scope)
            scope["state"]["ended"] = status_of(error)
            piece = self._answer.failed(error)
        await send({"type": "http.response.body", "body": piece, "more_body": False})

    async def _next(self) -> bytes:
        """Return the next events, at least one."""
        piece = b""
        while not piece:
            taken = await self._call.read()
            piece = await made_ready(self._call.shows_scores, self._take, taken)
            if self._call.ended:
                piece += self._answer.end()
        return piece

    def _take(self, taken: Sequence[tuple[int, TextDelta]]) -> bytes:
        return b"".join([self._answer.take(index, delta) for index, delta in taken])


class JsonWhenDone(_Watched):
    """A JSON body computed while the client waits; bytes are sent unchanged."""

    async def _reply(self, scope: Scope, send: Send) -> None:
        body = await self._answer.whole()
        if not isinstance(body, bytes):
            body = await in_thread(dumps_large, body) if self._call.shows_much else dumps(body).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})


def reply(service: Service, call: GenerationCall, answer: Answer, streams: bool | None) -> Response:
    """Return the reply to a call, as a stream or whole."""
    kind = EventStream if streams else JsonWhenDone
    return kind(call, service.forget, answer)
