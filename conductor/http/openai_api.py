"""OpenAI's routes: /v1/chat/completions, /v1/completions, /v1/models."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from tanghulu.conductor.http import openai_format as shape
from tanghulu.conductor.http.answers import AnswerReader
from tanghulu.conductor.http.generation import GenerationCall, TextDelta
from tanghulu.conductor.http.preprocess import ParsedRequest, parse_chat, parse_completion
from tanghulu.conductor.http.reply import DONE, EventStream, JsonWhenDone, reading
from tanghulu.conductor.http.schema import ChatBody, CompletionBody
from tanghulu.conductor.http.service import Service
from tanghulu.conductor.routing.requests import FinishReason, TokenLogprobs
from tanghulu.errors import TanghuluError

#: The logprobs of a choice's next tokens, as the API shows them.
Logprobs = Callable[[int, Sequence[TokenLogprobs]], Any]


def router(service: Service) -> APIRouter:
    """The routes."""
    api = APIRouter()
    started = int(time.time())

    @api.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        """A chat completion."""
        async with reading(request, service, ChatBody) as body:
            model = await service.find_model(body.model)
            parsed = await parse_chat(body, model, service.parsers)
        call = service.start(f"chatcmpl-{body.call_id or uuid.uuid4().hex}", parsed)
        num_top = body.top_logprobs or 0

        def logprobs(_: int, values: Sequence[TokenLogprobs]) -> Any:
            return shape.chat_logprobs(model, values, num_top)

        if parsed.new_parser is not None:
            return _parsed_answer(service, call, parsed, body)
        reader = _Reader(call, logprobs if body.logprobs else None)
        if body.stream:
            writer = shape.ChunkWriter(call, True, body.include_usage, body.continuous_usage)
            return EventStream(call, service.forget, reader.stream(writer, True, body.include_usage), reader.failed)
        return JsonWhenDone(call, service.forget, lambda: reader.whole(shape.whole_text_chat))

    @api.post("/v1/completions")
    async def completions(request: Request) -> Response:
        """A text completion."""
        async with reading(request, service, CompletionBody) as body:
            model = await service.find_model(body.model)
            parsed = await parse_completion(body, model)
        skip = body.skip_special_tokens
        echoes = [model.decode(r.prompt.tolist(), skip) for r in parsed.requests] if body.echo else []
        by_choice = [shape.CompletionLogprobs(model) for _ in parsed.requests]
        call = service.start(f"cmpl-{body.call_id or uuid.uuid4().hex}", parsed)
        wanted = body.logprobs is not None
        reader = _Reader(call, (lambda i, values: by_choice[i].of(values)) if wanted else None, echoes)
        if body.stream:
            writer = shape.ChunkWriter(call, False, body.include_usage, body.continuous_usage)
            return EventStream(call, service.forget, reader.stream(writer, False, body.include_usage), reader.failed)
        return JsonWhenDone(call, service.forget, lambda: reader.whole(shape.whole_completion))

    @api.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The models that workers serve now."""
        served = service.dispatcher.registry.served()
        return {"object": "list", "data": [shape.model_entry(model, started) for model in served]}

    @api.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        """One of them."""
        return shape.model_entry(await service.find_model(name), started)

    return api


def _parsed_answer(service: Service, call: GenerationCall, parsed: ParsedRequest, body: ChatBody) -> Response:
    """The reply to a chat whose text is read for reasoning and tool calls."""
    assert parsed.new_parser is not None
    num_top = body.top_logprobs or 0

    def logprobs(values: Sequence[TokenLogprobs]) -> Any:
        return shape.chat_logprobs(call.model, values, num_top)

    reader = AnswerReader(call, parsed.new_parser, parsed.most_calls, logprobs if body.logprobs else None)
    if not body.stream:
        return JsonWhenDone(call, service.forget, reader.whole)
    writer = shape.ChunkWriter(call, True, body.include_usage)
    return EventStream(call, service.forget, reader.stream(writer, body.include_usage), reader.failed)


class _Reader:
    """Reads a call to its end, as a stream or as a whole."""

    def __init__(self, call: GenerationCall, logprobs: Logprobs | None, echoes: Sequence[str] = ()) -> None:
        self._call = call
        self._logprobs = logprobs
        self._echoes = echoes
        self._waiting: dict[int, list[TokenLogprobs]] = {}

    async def stream(
        self, writer: shape.ChunkWriter, is_chat: bool, include_usage: bool
    ) -> AsyncGenerator[bytes, None]:
        """Server-sent events, each behind the first with what one step brought."""
        started: set[int] = set()
        async for index, delta in self._call.deltas():
            first = index not in started
            started.add(index)
            opening = self._opening(writer, index, is_chat) if first else b""
            piece = opening + self._chunks(writer, index, delta)
            if piece:
                yield piece
        yield (writer.usage(self._call) if include_usage else b"") + DONE

    def failed(self, _: TanghuluError) -> dict[str, Any]:
        """The ends of the choices that an error has cut short."""
        return {"choices": shape.failed_choices(self._call)}

    async def whole(
        self, form: Callable[[GenerationCall, Sequence[tuple[str, Any, FinishReason]]], dict[str, Any]]
    ) -> dict[str, Any]:
        """The whole answer, when all sequences have ended."""
        count = len(self._call.generations)
        texts = [self._echo(i) for i in range(count)]
        logprobs: list[list[TokenLogprobs]] = [[] for _ in range(count)]
        finishes = [FinishReason.ABORTED] * count
        async for index, delta in self._call.deltas():
            texts[index] += delta.text
            logprobs[index] += delta.logprobs
            finishes[index] = delta.finish or finishes[index]
        shown = [self._logprobs(i, values) if self._logprobs else None for i, values in enumerate(logprobs)]
        return form(self._call, list(zip(texts, shown, finishes, strict=True)))

    def _echo(self, index: int) -> str:
        return self._echoes[index] if self._echoes else ""

    def _opening(self, writer: shape.ChunkWriter, index: int, is_chat: bool) -> bytes:
        if is_chat:
            return writer.role(index)
        return writer.text(index, self._echo(index)) if self._echo(index) else b""

    def _chunks(self, writer: shape.ChunkWriter, index: int, delta: TextDelta) -> bytes:
        """Yield the chunks of a stream; log probabilities wait for their text while it is held back."""
        values = self._with_waiting(index, delta) if self._logprobs is not None else []
        piece = b""
        if delta.text or values:
            shown = self._logprobs(index, values) if self._logprobs is not None else None
            piece = writer.text(index, delta.text, shown)
        if delta.finish is not None:
            piece += writer.finish(index, delta.finish.value)
        return piece

    def _with_waiting(self, index: int, delta: TextDelta) -> list[TokenLogprobs]:
        values = self._waiting.pop(index, []) + delta.logprobs
        if delta.text or delta.finish is not None:
            return values
        self._waiting[index] = values
        return []
