"""vLLM's HTTP API: token ids to ``/v1/completions`` and back, its descriptions of itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tanghulu.conductor.engines.client import EngineClient
from tanghulu.conductor.engines.dialect import (
    LEAST_LOGPROB,
    AnswerPiece,
    EngineAnswer,
    EngineCall,
    EngineDialect,
    StreamError,
    decoded,
    served_models,
)
from tanghulu.conductor.engines.model import ServerFacts
from tanghulu.errors import NodeUnavailable
from tanghulu.rpc.wire import U32
from tanghulu.runtime.kv_endpoints import NO_EVENTS, EventEndpoints
from tanghulu.runtime.scraping import samples_in
from tanghulu.session.outputs import TokenLogprobs
from tanghulu.session.sampling import VLLM_GRAMMARS

_TOKEN = "token_id:"
_DEFAULT_BLOCK = 16


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct):
    token_ids: list[U32] | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: StreamError | None = None
    kv_transfer_params: dict[str, Any] | None = None


class _Source(msgspec.Struct):
    endpoint: str | None = None
    replay_endpoint: str | None = None


class VllmStream(EngineAnswer):
    """Reads the events of one answer of ``/v1/completions``, or the whole answer without streaming."""

    def read(self, data: bytes, piece: AnswerPiece) -> None:
        """Add the event's contents."""
        event = decoded(data, _Event, self.server)
        if event.error is not None:
            self.fail_with(event.error)
        if event.usage is not None and event.usage.prompt_tokens_details is not None:
            piece.cached_tokens = event.usage.prompt_tokens_details.cached_tokens
        if event.kv_transfer_params is not None:
            piece.kv_transfer = event.kv_transfer_params
        for choice in event.choices:
            if choice.token_ids:
                piece.tokens += choice.token_ids
            if choice.logprobs is not None:
                piece.logprobs += _logprobs(choice.logprobs, choice.token_ids or [], self.num_top)
            if choice.finish_reason is not None:
                piece.finish = self.finish(choice.finish_reason)


def _logprobs(given: _Logprobs, tokens: list[int], num_top: int) -> list[TokenLogprobs]:
    made, tops = [], given.top_logprobs or [None] * len(tokens)
    for token, own, top in zip(tokens, given.token_logprobs, tops, strict=False):
        best = sorted((top or {}).items(), key=lambda each: -each[1])
        named = [(int(name.removeprefix(_TOKEN)), value) for name, value in best if name.startswith(_TOKEN)]
        entries = [(token, LEAST_LOGPROB if own is None else own), *named[:num_top]]
        made.append(TokenLogprobs(tuple(each for each, _ in entries), tuple(value for _, value in entries)))
    return made


class VllmDialect(EngineDialect):
    """``/v1/completions`` with token ids: every version and every server has it."""

    engine, prefix = "vllm", "vllm:"
    generate_path, health_path, drop_path = "/v1/completions", "/health", "/reset_prefix_cache"
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    ends_unhealthy = repeats_exactly = True
    stream = VllmStream

    def body(self, call: EngineCall) -> dict[str, Any]:
        """Return the body of a request."""
        sampling, request = call.request.sampling, call.request
        body: dict[str, Any] = {
            "model": call.model,
            "prompt": call.tokens.tolist(),
            "return_token_ids": True,
            "stream": not call.hand_over,
            **call.sampling(),
        }
        more = {
            "stream_options": {"include_usage": True} if not call.hand_over else None,
            "structured_outputs": {VLLM_GRAMMARS[kind]: text for kind, text in filter(None, (sampling.grammar,))},
            "priority": -request.priority,  # the lower runs first there
            "cache_salt": call.cache_salt,
            "vllm_xargs": {"kv_cache_report_mode": "full"} if call.full_report else None,
            "kv_transfer_params": call.kv_transfer,
        }
        if sampling.num_logprobs is not None:
            body |= {"logprobs": sampling.num_logprobs, "return_tokens_as_token_ids": True}
        return body | {name: value for name, value in more.items() if value}

    async def facts(self, client: EngineClient) -> ServerFacts:
        """Read ``/v1/models``, the metrics and, in newer versions, ``/kv_event_sources``."""
        name, root, context, adapters = await served_models(client)
        page = await client.call("/metrics", optional=True)
        samples = samples_in(page.decode(errors="replace"))
        config: Mapping[str, str] = next((each for name, each, _ in samples if name == "vllm:cache_config_info"), {})
        blocks, size = config.get("num_gpu_blocks", ""), config.get("block_size", "")
        if not context:
            raise NodeUnavailable(f"{client.server.url} does not state the max_model_len of {name}")
        block = int(size) if size.isdecimal() and int(size) else _DEFAULT_BLOCK
        caches = config.get("enable_prefix_caching") != "False"
        events = await event_endpoints(client) if caches else NO_EVENTS
        num_blocks = int(blocks) if blocks.isdecimal() else 0
        return ServerFacts(name, root, context, block, num_blocks, 0, events, adapters, caches)

    def probe(self, model: str) -> dict[str, Any]:
        """Return a request for one token, with a salt that no other prompt has."""
        return {"model": model, "prompt": [0], "max_tokens": 1, "temperature": 0.0, "cache_salt": "tanghulu probe"}


async def event_endpoints(client: EngineClient) -> EventEndpoints:
    """Return the addresses of a server's events, as reached from here."""
    if client.server.events:
        return client.server.event_endpoints
    data = await client.call("/kv_event_sources", optional=True)
    ranks = list(decoded(data, dict[str, _Source], client.server.url).values()) if data else []
    if len(ranks) != 1:  # several ranks have caches of their own
        return NO_EVENTS
    return EventEndpoints(ranks[0].endpoint or "", ranks[0].replay_endpoint or "").at(client.server.address.host)
