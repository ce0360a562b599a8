"""OpenAI's routes: /v1/chat/completions, /v1/completions, /v1/models."""

from __future__ import annotations

import functools
import time
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from tanghulu.conductor.http import openai_format as shape
from tanghulu.conductor.http.answers import Choice, ChoicesAnswer, Logprobs
from tanghulu.conductor.http.prompt_logprobs import EchoedLogprobs
from tanghulu.conductor.http.reply import reading, reply
from tanghulu.conductor.inference.generation import Generation, GenerationCall
from tanghulu.conductor.inference.preprocess import parse_chat, parse_completion
from tanghulu.conductor.inference.schema import ChatBody, CompletionBody, OpenAIBody
from tanghulu.conductor.inference.service import Service
from tanghulu.conductor.text.preparing import in_thread


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
        logprobs = functools.partial(shape.chat_logprobs, model, num_top=num_top) if body.logprobs else None
        choices = [Choice(parsed.new_reader(), logprobs) for _ in call.generations]
        return _reply(service, call, choices, body)

    @api.post("/v1/completions")
    async def completions(request: Request) -> Response:
        """Answer with a text completion."""
        async with reading(request, service, CompletionBody) as body:
            model = await service.find_model(body.model)
            parsed = await parse_completion(body, model)
        skip = body.skip_special_tokens
        echoes: list[str | None] = [None] * len(parsed.requests)
        if body.echo:
            echoes = [await in_thread(model.decode, request.prompt.tolist(), skip) for request in parsed.requests]
        call = service.start(f"cmpl-{body.call_id or uuid.uuid4().hex}", parsed)
        choices = [
            Choice(parsed.new_reader(), _logprobs_of(generation, body), echo)
            for generation, echo in zip(call.generations, echoes, strict=True)
        ]
        return _reply(service, call, choices, body)

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


def _reply(service: Service, call: GenerationCall, choices: Sequence[Choice], body: OpenAIBody) -> Response:
    writer = shape.ChunkWriter(call, isinstance(body, ChatBody), body.include_usage, body.continuous_usage)
    return reply(service, call, ChoicesAnswer(call, writer, choices, body.prompt_logprobs), body.stream)


def _logprobs_of(generation: Generation, body: CompletionBody) -> Logprobs | None:
    """Return the formatter for the log probabilities of a text, and of its prompt if that is echoed."""
    if body.logprobs is None:
        return None
    if not body.echo:
        return shape.CompletionLogprobs(generation.model, body.skip_special_tokens).of
    return EchoedLogprobs(generation, body.logprobs, body.skip_special_tokens).of
