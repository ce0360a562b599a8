"""Routes for people and orchestrators: health, readiness, metrics, tokenizing, and explanations of routing."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from tanghulu.auth.api_keys import ApiKey, KeyRight
from tanghulu.conductor.dispatch.router import RoutedRequest
from tanghulu.conductor.http.reply import dumps, note_sender, parse_held, reading
from tanghulu.conductor.inference.preprocess import ParsedRequest, parse_chat, parse_completion, tokenise
from tanghulu.conductor.inference.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from tanghulu.conductor.inference.service import Service
from tanghulu.conductor.stories.account import Audience
from tanghulu.conductor.stories.book import MAX_KEPT
from tanghulu.conductor.text.preparing import in_thread, made_ready
from tanghulu.conductor.text.served_model import ServedModel
from tanghulu.hashing import Tokens
from tanghulu.web.errors import BadField, RequestNotFound
from tanghulu.web.routes import add_metrics


def router(service: Service) -> APIRouter:
    """Build the routes."""
    api = APIRouter()
    _add_health(api, service)
    _add_stories(api, service)
    add_metrics(api, service.metrics)

    @api.get("/route")
    @api.post("/route")
    async def route(request: Request) -> dict[str, Any]:
        """Return where a completion or chat with this body would go now, and why. GET also takes ?prompt=&model=.

        The scores and loads of the workers depend on all tenants, so an API key needs the right to metrics to see them.
        """
        async with service.bodies.reading(request.scope, request.receive) as body:
            with body.view() as view, contextlib.ExitStack() as held:
                parsed = await _parse_body(service, bytes(view), request, held)
        found = service.dispatcher.router.explain(parsed.requests[0], parsed.model)
        key: ApiKey | None = getattr(request.state, "api_key", None)
        all_tenants = key is None or key.may(KeyRight.METRICS)
        return _explanation(parsed, found) | (_loads(found) if all_tenants else {})

    @api.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        """Convert text, texts or a chat to token ids."""
        async with reading(request, service, TokenizeBody) as body:
            model = await service.find_model(body.model)
            tokens = await tokenise(body, model, service.parsers)
            shown = await made_ready(body.is_large, _tokenised, tokens, isinstance(body.prompt, list), model)
        return Response(shown, media_type="application/json")

    @api.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        """Convert token ids to text, under vLLM's name and SGLang's."""
        async with reading(request, service, DetokenizeBody) as body:
            model = await service.find_model(body.model)
            await made_ready(body.is_large, model.checked_tokens, body.tokens)
            shown = await in_thread(_detokenised, body, model)
        return Response(shown, media_type="application/json")

    return api


def _detokenised(body: DetokenizeBody, model: ServedModel) -> bytes:
    """Return the answer of /detokenize as JSON."""
    text = model.decode(body.tokens, body.skip_special_tokens)
    return dumps({"prompt": text, "text": text}).encode()


def _tokenised(texts: Sequence[Tokens], is_list: bool, model: ServedModel) -> bytes:
    """Return the answer of /tokenize as JSON: a general-purpose encoder takes seconds for a million ids."""
    tokens: Any = [ids.tolist() for ids in texts]
    count: Any = [len(ids) for ids in tokens]
    shown = {"count": count, "tokens": tokens} if is_list else {"count": count[0], "tokens": tokens[0]}
    return msgspec.json.encode({**shown, "max_model_len": model.card.context_length})


def _add_health(api: APIRouter, service: Service) -> None:
    """Add the routes that report the health of the conductor and its workers."""

    @api.get("/live")
    async def live() -> dict[str, Any]:
        """Respond if the process is alive."""
        return {"status": "ok"}

    @api.get("/health")
    async def health() -> Response:
        """Return 200 once requests can be served; else 503 and the missing parts. Benchmarks wait for it."""
        missing = service.missing()
        status = {"status": "not ready", "missing": missing} if missing else {"status": "ok"}
        return JSONResponse(status, 503 if missing else 200)

    @api.get("/health_generate")
    async def health_generate(timeout_s: Annotated[float, Query(gt=0, le=120)] = 20.0) -> Response:
        """Return 200 if workers exist and each computes a token within ``timeout_s``, else 503; reports each worker."""
        workers = await service.probe(timeout_s)
        healthy = bool(workers) and all(worker["healthy"] for worker in workers)
        return JSONResponse({"healthy": healthy, "workers": workers}, 200 if healthy else 503)

    @api.get("/ready")
    async def ready() -> Response:
        """Return 200 once requests can be served; else 503 and the missing parts."""
        missing = service.missing()
        return JSONResponse({"ready": not missing, "missing": missing}, 503 if missing else 200)


def _add_stories(api: APIRouter, service: Service) -> None:
    """Add the routes that show where requests spend their time."""
    stories = service.dispatcher.stories

    @api.get("/debug/requests")
    async def requests(request: Request, limit: Annotated[int, Query(ge=1, le=MAX_KEPT)] = 100) -> dict[str, Any]:
        """Return where requests spent their time: those in progress, oldest first, then the most recently ended."""
        now_s = service.dispatcher.clock.now_s()
        audience = _audience(request)
        return {"requests": [story.summary(now_s, audience) for story in stories.stories()[:limit]]}

    @api.get("/debug/requests/{name:path}")
    async def one_request(name: str, request: Request) -> dict[str, Any]:
        """Return the stories of a request, by its id in the answer, its x-request-id or its trace id."""
        now_s = service.dispatcher.clock.now_s()
        found = stories.find(name)
        if not found:
            raise RequestNotFound(
                f"request {name[:128]!r} is neither in progress nor among the last {MAX_KEPT} that ended"
            )
        return {"requests": [story.summary(now_s, _audience(request)) for story in found]}


def _audience(request: Request) -> Audience:
    return Audience.of(getattr(request.state, "api_key", None), Audience.ADMIN)


async def _parse_body(service: Service, body: bytes, request: Request, held: contextlib.ExitStack) -> ParsedRequest:
    query = request.query_params
    if not body and "prompt" in query:
        body = dumps({key: query[key] for key in ("prompt", "model") if key in query}).encode()
    if not body:
        raise BadField("the prompt is missing; send the body of a completion or a chat, or ?prompt=TEXT", "prompt")
    if b'"messages"' in body:
        chat = await parse_held(ChatBody, body, service, held)
        note_sender(chat, request)
        return await parse_chat(chat, await service.find_model(chat.model), service.parsers)
    completion = await parse_held(CompletionBody, body, service, held)
    note_sender(completion, request)
    return await parse_completion(completion, await service.find_model(completion.model))


def _explanation(parsed: ParsedRequest, route: RoutedRequest) -> dict[str, Any]:
    decision = route.decision
    return {
        "model": parsed.model.card.model,
        "policy": route.policy,
        "num_prompt_tokens": route.request.num_tokens,
        "num_blocks": route.request.num_blocks,
        "block_tokens": route.request.block_tokens,
        "hit_blocks": {"workers": route.hits.workers, "store": route.hits.store},
        "prefill": decision.prefill if decision else None,
        "decode": decision.decode if decision else None,
    }


def _loads(route: RoutedRequest) -> dict[str, Any]:
    return {
        "candidates": [
            {"worker": c.worker, "phase": c.phase, "score": c.score, **dict(c.terms)}
            for c in (route.decision.candidates if route.decision else ())
        ],
        "workers": [
            {
                "id": w.id,
                "can_prefill": w.can_prefill,
                "can_decode": w.can_decode,
                "queue_tokens": w.queue_tokens,
                "num_requests": w.num_requests,
                "blocks_free": w.blocks_free,
                "blocks_total": w.blocks_total,
                "prefill_tokens_per_s": w.prefill_tokens_per_s,
                "hit_blocks": w.hit_blocks,
                "coming_blocks": w.coming_blocks,
                "coming_requests": w.coming_requests,
            }
            for w in route.workers
        ],
    }
