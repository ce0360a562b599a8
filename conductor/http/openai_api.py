"""OpenAI's routes: /v1/chat/completions, /v1/completions, /v1/models."""

from __future__ import annotations

import functools
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from tanghulu.conductor.http import openai_format as shape
from tanghulu.conductor.http.answers import Choice, ParsedStream, whole_answer
from tanghulu.conductor.http.prompt_logprobs import EchoedLogprobs, with_prompt_logprobs
from tanghulu.conductor.http.reply import DONE, EventStream, JsonWhenDone, last_events, reading
from tanghulu.conductor.inference.generation import Generation, GenerationCall, TextDelta
from tanghulu.conductor.inference.preprocess import ParsedRequest, parse_chat, parse_completion
from tanghulu.conductor.inference.schema import ChatBody, CompletionBody, OpenAIBody
from tanghulu.conductor.inference.service import Service
from tanghulu.conductor.text.preparing import in_thread, made_ready
from tanghulu.errors import TanghuluError
from tanghulu.session.outputs import FinishReason, TokenLogprobs

#: Formats the logprobs of a choice's next tokens for the API.
Logprobs = Callable[[int, Sequence[TokenLogprobs]], Any]


def router(service: Service) -> APIRouter:
    """Build the routes."""
    api = APIRouter()
    started = int(time.time())

    @api.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        """Answer with a chat completion."""
        async with reading(request, service, ChatBody) as body:
            model = await service.find_model(body.model)
            parsed = await parse_chat(body, model, service.parsers)
        call = service.start(f"chatcmpl-{body.call_id or uuid.uuid4().hex}", parsed)
        num_top = body.top_logprobs or 0

        def logprobs(_: int, values: Sequence[TokenLogprobs]) -> Any:
            return shape.chat_logprobs(model, values, num_top)

        if parsed.new_parser is not None:
            return _parsed_answer(service, call, parsed, body)
        shown = logprobs if body.logprobs else None
        if body.stream:
            writer = shape.ChunkWriter(call, True, body.include_usage, body.continuous_usage)
            return EventStream(call, service.forget, _TextStream(call, writer, shown))
        return _whole_reply(service, call, lambda: _whole_text(call, shape.whole_text_chat, shown), body)

    @api.post("/v1/completions")
    async def completions(request: Request) -> Response:
        """Answer with a text completion."""
        async with reading(request, service, CompletionBody) as body:
            model = await service.find_model(body.model)
            parsed = await parse_completion(body, model)
        skip = body.skip_special_tokens
        echoed = parsed.requests if body.echo else []
        echoes = [await in_thread(model.decode, request.prompt.tolist(), skip) for request in echoed]
        call = service.start(f"cmpl-{body.call_id or uuid.uuid4().hex}", parsed)
        by_choice = [_logprobs_of(generation, body) for generation in call.generations]
        logprobs = (lambda i, values: by_choice[i].of(values)) if body.logprobs is not None else None
        if body.stream:
            writer = shape.ChunkWriter(call, False, body.include_usage, body.continuous_usage)
            return EventStream(call, service.forget, _TextStream(call, writer, logprobs, echoes))
        whole = functools.partial(_whole_text, call, shape.whole_completion, logprobs, echoes)
        return _whole_reply(service, call, whole, body)

    @api.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the models currently served by workers."""
        served = service.dispatcher.registry.served()
        return {"object": "list", "data": [shape.model_entry(model, started) for model in served]}

    @api.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        """Return one model."""
        return shape.model_entry(await service.find_model(name), started)

    return api


def _whole_reply(
    service: Service, call: GenerationCall, compute: Callable[[], Awaitable[dict[str, Any]]], body: OpenAIBody
) -> Response:
    """Build a reply that is sent whole, with the prompt's log probabilities under vLLM's name if requested."""

    async def answer() -> dict[str, Any]:
        computed = await compute()
        return await made_ready(call.shows_scores, with_prompt_logprobs, computed, call, body.prompt_logprobs)

    return JsonWhenDone(call, service.forget, answer)


def _logprobs_of(generation: Generation, body: CompletionBody) -> shape.CompletionLogprobs:
    """Return the formatter for the log probabilities of a text, and of its prompt if that is echoed."""
    if not body.echo:
        return shape.CompletionLogprobs(generation.model, body.skip_special_tokens)
    return EchoedLogprobs(generation, body.logprobs or 0, body.skip_special_tokens)


def _parsed_answer(service: Service, call: GenerationCall, parsed: ParsedRequest, body: ChatBody) -> Response:
    """Build the reply to a chat whose text is parsed for reasoning and tool calls."""
    assert parsed.new_parser is not None
    num_top = body.top_logprobs or 0

    def logprobs(values: Sequence[TokenLogprobs]) -> Any:
        return shape.chat_logprobs(call.model, values, num_top)

    shown = logprobs if body.logprobs else None
    choices = [Choice(parsed.new_parser(), parsed.most_calls) for _ in call.generations]
    if not body.stream:
        return _whole_reply(service, call, lambda: whole_answer(call, choices, shown), body)
    writer = shape.ChunkWriter(call, True, body.include_usage, body.continuous_usage)
    return EventStream(call, service.forget, ParsedStream(call, writer, choices, shown))


async def _whole_text(
    call: GenerationCall,
    form: Callable[[GenerationCall, Sequence[tuple[str, Any, FinishReason]]], dict[str, Any]],
    logprobs: Logprobs | None,
    echoes: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the whole answer, once all sequences have ended."""
    count = len(call.generations)
    texts: list[list[str]] = [[echo] for echo in echoes] or [[] for _ in range(count)]
    values: list[list[TokenLogprobs]] = [[] for _ in range(count)]
    finishes = [FinishReason.ABORTED] * count
    while not call.ended:
        for index, delta in await call.read():
            texts[index] += delta.pieces
            values[index] += delta.logprobs
            finishes[index] = delta.finish or finishes[index]

    def formed() -> dict[str, Any]:
        shown = [logprobs(i, each) if logprobs is not None else None for i, each in enumerate(values)]
        return form(call, list(zip(map("".join, texts), shown, finishes, strict=True)))

    return await made_ready(call.shows_much, formed)


class _TextStream:
    """Text as server-sent events, one per token with visible text; each choice begins with its role or its echo."""

    def __init__(
        self,
        call: GenerationCall,
        writer: shape.ChunkWriter,
        logprobs: Logprobs | None,
        echoes: Sequence[str] = (),
    ) -> None:
        self._call = call
        self._writer = writer
        self._logprobs = logprobs
        self._echoes = echoes
        self._begun: set[int] = set()
        self._waiting: dict[int, list[TokenLogprobs]] = {}

    def take(self, index: int, delta: TextDelta) -> bytes:
        piece = b""
        if index not in self._begun:
            self._begun.add(index)
            echo = self._echoes[index] if self._echoes else ""
            if echo and self._logprobs is not None:
                piece = self._writer.text(index, echo, self._logprobs(index, []))
            else:
                piece = self._writer.opening(index, echo)
        if self._logprobs is None:
            piece += self._writer.texts(index, delta.pieces)
        elif values := self._values(index, delta):
            piece += self._writer.text(index, delta.text, self._logprobs(index, values))
        if delta.finish is not None:
            piece += self._writer.finish(index, delta.finish.value)
        return piece

    def end(self) -> bytes:
        return self._writer.end() + DONE

    def failed(self, error: TanghuluError) -> bytes:
        return last_events(error, choices=shape.failed_choices(self._call))

    def _values(self, index: int, delta: TextDelta) -> list[TokenLogprobs]:
        """Return the log probabilities to show; they are held back together with their text."""
        values = self._waiting.pop(index, []) + delta.logprobs
        if delta.pieces or delta.finish is not None:
            return values
        self._waiting[index] = values
        return []
