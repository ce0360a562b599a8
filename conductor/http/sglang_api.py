"""SGLang's routes: /generate, /abort_request, /flush_cache."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from tanghulu.conductor.http.generation import Generation, GenerationCall
from tanghulu.conductor.http.preprocess import parse_generate
from tanghulu.conductor.http.reply import DONE, EventStream, JsonWhenDone, dumps, event, reading
from tanghulu.conductor.http.schema import AbortBody, GenerateBody
from tanghulu.conductor.http.service import Service
from tanghulu.conductor.routing.requests import FinishReason
from tanghulu.errors import TanghuluError
from tanghulu.web.errors import status_of


def router(service: Service) -> APIRouter:
    """The routes."""
    api = APIRouter()

    @api.post("/generate")
    async def generate(request: Request) -> Response:
        """Continue a text or token ids."""
        async with reading(request, service, GenerateBody) as body:
            model = await service.find_model(body.model)
            parsed = await parse_generate(body, model)
        call = service.start(body.rid or uuid.uuid4().hex, parsed)
        reader = _Reader(call, body.is_batch or parsed.num_choices > 1)
        if body.stream:
            return EventStream(call, service.forget, reader.stream(), reader.failed)
        return JsonWhenDone(call, service.forget, reader.whole)

    @api.post("/abort_request")
    async def abort_request(request: Request) -> dict[str, Any]:
        """End a request by its rid (or by the id of an OpenAI answer)."""
        async with reading(request, service, AbortBody) as body:
            wanted = list(service.calls) if body.abort_all else [body.rid]
        return {"aborted": sum(service.abort(call_id) for call_id in wanted)}

    @api.api_route("/flush_cache", methods=["GET", "POST"])
    async def flush_cache() -> dict[str, Any]:
        """Make all workers forget their unreferenced blocks; the store keeps its chunks."""
        return {"success": True, "num_blocks": await service.dispatcher.registry.drop_caches()}

    return api


class _Reader:
    """Reads a call to its end. Texts in a stream are cumulative, as SGLang's are."""

    def __init__(self, call: GenerationCall, is_batch: bool) -> None:
        self._call = call
        self._is_batch = is_batch
        self._started_s = time.monotonic()
        self._texts = [""] * len(call.generations)
        self._tokens: list[list[int]] = [[] for _ in call.generations]

    async def stream(self) -> AsyncGenerator[bytes, None]:
        async for index, delta in self._call.deltas():
            self._take(index, delta.text, delta.tokens)
            answer = self._answer(index, delta.finish)
            if delta.finish is None:
                del answer["output_ids"]
            if self._is_batch:
                answer["index"] = index
            yield event(dumps(answer))
        yield DONE

    def failed(self, error: TanghuluError) -> dict[str, Any]:
        """How the answer ended that an error has cut short."""
        reason = {"type": "abort", "message": error.message, "status_code": status_of(error)}
        return {"meta_info": {"id": self._call.id, "finish_reason": reason}}

    async def whole(self) -> Any:
        """One answer, or a list of them for a batch."""
        finishes = [FinishReason.ABORTED] * len(self._texts)
        async for index, delta in self._call.deltas():
            self._take(index, delta.text, delta.tokens)
            finishes[index] = delta.finish or finishes[index]
        answers = [self._answer(index, finish) for index, finish in enumerate(finishes)]
        return answers if self._is_batch else answers[0]

    def _take(self, index: int, text: str, tokens: list[int]) -> None:
        self._texts[index] += text
        self._tokens[index] += tokens

    def _answer(self, index: int, finish: FinishReason | None) -> dict[str, Any]:
        generation = self._call.generations[index]
        return {
            "text": self._texts[index],
            "output_ids": self._tokens[index],
            "meta_info": {
                "id": self._call.id if len(self._texts) == 1 else f"{self._call.id}-{index}",
                "prompt_tokens": generation.num_prompt_tokens,
                "completion_tokens": generation.num_generated,
                "cached_tokens": generation.cached_tokens,
                "finish_reason": _finish_reason(generation, finish),
                "e2e_latency": time.monotonic() - self._started_s,
            },
        }


def _finish_reason(generation: Generation, finish: FinishReason | None) -> dict[str, Any] | None:
    match finish:
        case None:
            return None
        case FinishReason.STOP:
            return {"type": "stop", "matched": generation.matched}
        case FinishReason.LENGTH:
            return {"type": "length", "length": generation.num_generated}
        case FinishReason.ABORTED:
            return {"type": "abort", "message": "the request was aborted"}
