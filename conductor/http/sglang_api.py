"""SGLang's routes: /generate, /abort_request, /flush_cache, and information on model and server."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any, Final

from fastapi import APIRouter, Request
from msgspec import structs
from starlette.responses import Response

from tanghulu.conductor.http.prompt_logprobs import sglang_input_logprobs
from tanghulu.conductor.http.reply import DONE, dumps, dumps_large, last_events, reading, reply
from tanghulu.conductor.inference.generation import Generation, GenerationCall, TextDelta
from tanghulu.conductor.inference.preprocess import parse_generate
from tanghulu.conductor.inference.schema import AbortBody, GenerateBody
from tanghulu.conductor.inference.service import Service
from tanghulu.conductor.text.preparing import made_ready
from tanghulu.conductor.text.served_model import ServedModel
from tanghulu.errors import TanghuluError
from tanghulu.session.outputs import FinishReason, TokenLogprobs
from tanghulu.version import __version__
from tanghulu.web.errors import status_of

#: A cumulative stream repeats its whole text in each event. So an event waits until the answer has grown by this
#: share of itself, which at first every token does: a text of n characters then costs 256 n bytes instead of n^2.
GROWTH_SHARE: Final = 256


def router(service: Service) -> APIRouter:
    """Build the routes."""
    api = APIRouter()

    @api.post("/generate")
    async def generate(request: Request) -> Response:
        """Continue a text or token ids."""
        async with reading(request, service, GenerateBody) as body:
            model = await service.find_model(body.model)
            parsed = await parse_generate(body, model)
        call_id, names = _call_names(body, parsed.num_choices)
        call = service.start(call_id, parsed, names)
        reader = _Reader(call, body.is_batch or parsed.num_choices > 1, body)
        return reply(service, call, reader, body.stream)

    @api.post("/abort_request")
    async def abort_request(request: Request) -> dict[str, Any]:
        """End a request by its rid (or by the id of an OpenAI answer), on whichever conductor has it."""
        async with reading(request, service, AbortBody) as body:
            key = request.scope.get("state", {}).get("api_key")
            return {"aborted": await service.abort(None if body.abort_all else body.rid, key)}

    @api.post("/flush_cache")
    async def flush_cache() -> dict[str, Any]:
        """Have all workers drop their unreferenced blocks; the store keeps its chunks."""
        return {"success": True, "num_blocks": await service.dispatcher.registry.drop_caches()}

    @api.get("/model_info")
    @api.get("/get_model_info")
    async def model_info() -> dict[str, Any]:
        """Return the first served model, under SGLang's names."""
        return _model_info(await service.find_model(None))

    @api.get("/server_info")
    @api.get("/get_server_info")
    async def server_info() -> dict[str, Any]:
        """Return the models and workers served here, and the work in progress."""
        registry = service.dispatcher.registry
        models = [_model_info(model) for model in registry.served()]
        return {
            **(models[0] if models else {}),
            "version": __version__,
            "models": models,
            "workers": [
                {"id": w.id, "role": w.role.value, "address": str(w.instance.address), "connected": w.usable}
                for w in registry.workers.values()
            ],
            "num_requests": service.dispatcher.num_requests,
            "num_waiting": service.dispatcher.num_waiting,
            "missing": service.missing(),
        }

    return api


def _model_info(model: ServedModel) -> dict[str, Any]:
    card = model.card
    return {
        "model_path": card.model,
        "served_model_name": card.model,
        "tokenizer_path": card.model,
        "is_generation": True,
        "context_length": card.context_length,
        "max_model_len": card.context_length,
        "vocab_size": card.vocab_size,
        "eos_token_ids": list(card.eos_token_ids),
        "preferred_sampling_params": structs.asdict(card.sampling_defaults),
        "has_image_understanding": False,
        "has_audio_understanding": False,
    }


def _call_names(body: GenerateBody, num_choices: int) -> tuple[str, Sequence[str]]:
    """Return the id of a call, and the names of its sequences if the client lists them."""
    if not isinstance(body.rid, list):
        return body.rid or uuid.uuid4().hex, ()
    numbers = [f"-{choice}" for choice in range(num_choices)] if num_choices > 1 else [""]
    return uuid.uuid4().hex, [f"{rid}{number}" for rid in body.rid for number in numbers]


#: The log probabilities of an answer: of its own tokens, of the most likely ones, of those requested by id.
_LOGPROBS: Final = ("token", "top", "token_ids")


class _Answer:
    """One growing sequence of a call in /generate's format: unclosed JSON, so that nothing is written twice."""

    def __init__(self) -> None:
        self.text, self.ids = bytearray(), bytearray()
        self.logprobs = {kind: bytearray() for kind in _LOGPROBS}
        self.shows_input = True
        self.shown_bytes = 0
        self.finish: FinishReason | None = None

    @property
    def num_bytes(self) -> int:
        return len(self.text) + len(self.ids) + sum(map(len, self.logprobs.values()))

    def add(self, delta: TextDelta, logprobs: Sequence[tuple[str, str, str]]) -> None:
        self.text += dumps(delta.text)[1:-1].encode()
        columns = zip(self.logprobs.values(), zip(*logprobs, strict=True), strict=False)  # none without logprobs
        for values, items in ((self.ids, map(str, delta.tokens)), *columns):
            for item in items:
                values += b"," * bool(values) + item.encode()
        self.finish = delta.finish or self.finish

    def clear(self) -> None:
        for part in (self.text, self.ids, *self.logprobs.values()):
            part.clear()

    @property
    def is_due(self) -> bool:
        """Whether a cumulative stream should show it now."""
        return self.finish is not None or self.num_bytes >= self.shown_bytes + self.shown_bytes // GROWTH_SHARE


class _Reader:
    """Reads a call to its end. Streamed texts are cumulative, as in SGLang, unless ``deltas`` are requested."""

    def __init__(self, call: GenerationCall, is_batch: bool, body: GenerateBody) -> None:
        self._call = call
        self._is_batch = is_batch
        self._deltas = body.stream_output
        self._with_text = body.return_text_in_logprobs
        self._answers = [_Answer() for _ in call.generations]

    def take(self, index: int, delta: TextDelta) -> bytes:
        answer, piece = self._take(index, delta), b""
        if self._deltas or answer.is_due:
            answer.shown_bytes = answer.num_bytes
            piece = b"data: " + self._shown(index, stream=True) + b"\n\n"
        if self._deltas:
            answer.clear()
        return piece

    def end(self) -> bytes:
        return DONE

    def failed(self, error: TanghuluError) -> bytes:
        """Return the end of an answer cut short by an error."""
        reason = {"type": "abort", "message": error.message, "status_code": status_of(error)}
        return last_events(error, meta_info={"id": self._call.id, "finish_reason": reason})

    async def whole(self) -> bytes:
        """Return one answer, or a list of them for a batch."""
        await self._call.read_all(self._take)
        for answer in self._answers:
            answer.finish = answer.finish or FinishReason.ABORTED
        return await made_ready(self._call.shows_scores, self._all_shown)

    def _all_shown(self) -> bytes:
        shown = [self._shown(index, stream=False) for index in range(len(self._answers))]
        return b"[" + b",".join(shown) + b"]" if self._is_batch else shown[0]

    def _take(self, index: int, delta: TextDelta) -> _Answer:
        answer = self._answers[index]
        num_requested = len(self._call.generations[index].request.sampling.logprob_token_ids)
        answer.add(delta, [self._logprobs(one, num_requested) for one in delta.logprobs if one.token_ids])
        return answer

    def _logprobs(self, one: TokenLogprobs, num_requested: int) -> tuple[str, str, str]:
        """Return the generated token, the most likely ones, and those requested by id, as (logprob, id, text) each."""
        bytes_of = self._call.model.detokenizers.token_bytes
        entries = [
            [logprob, token, bytes_of(token).decode(errors="replace") if self._with_text else None]
            for token, logprob in zip(one.token_ids, one.logprobs, strict=True)
        ]
        requested = len(entries) - num_requested
        return dumps(entries[0]), dumps(entries[1:requested]), dumps(entries[requested:])

    def _shown(self, index: int, stream: bool) -> bytes:
        answer, generation = self._answers[index], self._call.generations[index]
        meta = {
            "id": generation.name,
            "prompt_tokens": generation.num_prompt_tokens,
            "completion_tokens": generation.num_generated,
            "cached_tokens": generation.cached_tokens,
            "finish_reason": _finish_reason(generation, answer.finish),
            "e2e_latency": time.monotonic() - generation.stream.story.began_s,
        }
        if answer.finish is not None and (explained := generation.explanation) is not None:
            meta["cache_explanation"] = explained
        parts: list[bytes | bytearray] = [b'{"text":"', answer.text, b'"']
        if self._deltas or answer.finish is not None:
            parts += [b',"output_ids":[', answer.ids, b"]"]
        parts += [b',"meta_info":', dumps(meta).encode()[:-1]]
        sampling = generation.request.sampling
        if sampling.num_logprobs is not None:
            wanted = {"token": True, "top": sampling.num_logprobs > 0, "token_ids": bool(sampling.logprob_token_ids)}
            of_prompt = self._input(answer, generation)
            for kind in filter(wanted.get, _LOGPROBS):
                head = f',"input_{kind}_logprobs":{of_prompt[kind]},"output_{kind}_logprobs":['
                parts += [head.encode(), answer.logprobs[kind], b"]"]
        number = b',"index":%d' % index if stream and self._is_batch else b""
        return b"".join([*parts, b"}", number, b"}"])

    def _input(self, answer: _Answer, generation: Generation) -> dict[str, str]:
        """Return the prompt's log probabilities: in the first event and, if each event is cumulative, in the last."""
        shows = answer.shows_input or (answer.finish is not None and not self._deltas)
        answer.shows_input = False
        found = sglang_input_logprobs(generation, self._with_text) if shows else {}
        return {kind: dumps_large(found.get(kind, [])).decode() for kind in _LOGPROBS}


def _finish_reason(generation: Generation, finish: FinishReason | None) -> dict[str, Any] | None:
    match finish:
        case None:
            return None
        case FinishReason.STOP:
            return {"type": "stop", "matched": generation.matched}
        case FinishReason.LENGTH:
            return {"type": "length", "length": generation.num_generated}
        case _:
            return {"type": "abort", "message": "the request was aborted"}
