"""SGLang's HTTP API: token ids to ``/generate`` and back, its metrics, its descriptions of itself. Pure.

A stream's events carry all tokens so far, or with ``--incremental-streaming-output`` the new ones; in both, the last
``completion_tokens - n`` ids of an event are new after n. Example: with [5], then [5, 8] and 2 completion tokens, 8 is
new; and so with [8] and 2.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tanghulu.conductor.engines.client import EngineClient, error_of
from tanghulu.conductor.engines.dialect import (
    IMPOSSIBLE,
    SAME_DISTRIBUTION,
    SAME_MODEL,
    EngineCall,
    Piece,
    ServerFacts,
)
from tanghulu.conductor.engines.load import EngineFigures
from tanghulu.conductor.engines.model import ModelFacts
from tanghulu.conductor.engines.vllm import MAX_SEED, ListedModels, event_sources, reached, sampling_of
from tanghulu.errors import InvalidRequest, NodeUnavailable
from tanghulu.rpc.wire import U32
from tanghulu.runtime.scraping import Samples
from tanghulu.session.outputs import FinishReason, TokenLogprobs
from tanghulu.session.sampling import Sampling

#: Smallest page whose events are followed; with smaller ones, blocks of _OWN_BLOCK tokens are assumed instead.
MIN_PAGE, _OWN_BLOCK = 8, 64
_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class _Finish(msgspec.Struct):
    type: str
    message: str = ""
    status_code: int | None = None


_Entry = tuple[float | None, U32, str | None]


class _Meta(msgspec.Struct):
    finish_reason: _Finish | None = None
    completion_tokens: int = 0
    cached_tokens: int | None = None
    output_token_logprobs: list[_Entry] = []
    output_top_logprobs: list[list[_Entry] | None] = []


class _Error(msgspec.Struct):
    message: str = ""
    code: int | str | None = None


class _Event(msgspec.Struct):
    output_ids: list[U32] = []
    meta_info: _Meta = msgspec.field(default_factory=_Meta)
    error: _Error | None = None


class _KvEvents(msgspec.Struct):
    endpoint_host: str | None = None
    endpoint_port_base: int | None = None
    replay_endpoint_port_base: int | None = None


class _Info(msgspec.Struct):
    model_path: str = ""
    page_size: int | None = None
    max_total_num_tokens: int | None = None
    max_running_requests: int | None = None
    context_length: int | None = None
    dp_size: int | None = None
    disable_radix_cache: bool = False
    kv_events: _KvEvents | None = None


class SglangStream:
    """Reads the events of one answer of ``/generate``."""

    def __init__(self, server: str) -> None:
        self._server, self._num_seen = server, 0

    def read(self, data: bytes) -> Piece:
        """Return the event's contents."""
        try:
            event = msgspec.json.decode(data, type=_Event)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise NodeUnavailable(f"worker {self._server} sent an event that is none of SGLang's: {error}") from error
        if event.error is not None:
            code = event.error.code if isinstance(event.error.code, int) else 500
            raise error_of(code, event.error.message, self._server)
        meta = event.meta_info
        num_new = meta.completion_tokens - self._num_seen
        if not 0 <= num_new <= len(event.output_ids):
            raise NodeUnavailable(f"worker {self._server} left out tokens after the first {self._num_seen}")
        self._num_seen += num_new
        piece = Piece(event.output_ids[len(event.output_ids) - num_new :], cached_tokens=meta.cached_tokens)
        piece.logprobs = _logprobs(meta, num_new)
        if meta.finish_reason is not None:
            piece.finish = self._finish(meta.finish_reason)
        return piece

    def _finish(self, reason: _Finish) -> FinishReason:
        if reason.type not in _FINISH:
            status = reason.status_code if reason.status_code is not None else 500
            raise error_of(status, f"{reason.type} {reason.message}".strip(), self._server)
        return _FINISH[reason.type]


def _logprobs(meta: _Meta, num_new: int) -> list[TokenLogprobs]:
    own = meta.output_token_logprobs[-num_new:] if num_new else []
    top = meta.output_top_logprobs[-num_new:] if num_new else []
    made = []
    for at, first in enumerate(own):
        entries = [first, *((top[at] if at < len(top) else None) or [])]
        values = tuple(value if value is not None else float("-inf") for value, _, _ in entries)
        made.append(TokenLogprobs(tuple(token for _, token, _ in entries), values))
    return made


class SglangDialect:
    """SGLang's own door, which takes and gives token ids."""

    engine = "sglang"
    generate_path, health_path, drop_path = "/generate", "/ready", "/flush_cache"
    ends_unhealthy = False  # a draining server is not ready, and finishes what it has

    def body(self, call: EngineCall) -> dict[str, Any]:
        """Return the body; nothing is left to the server's defaults. Raises InvalidRequest for a Lark grammar."""
        sampling, request = call.request.sampling, call.request
        params = sampling_of(call) | {"max_new_tokens": call.max_tokens, "min_new_tokens": call.min_tokens}
        if bias := call.logit_bias:
            params["logit_bias"] = bias
        if sampling.seed is not None and call.seeded:
            params["sampling_seed"] = sampling.seed % MAX_SEED
        if sampling.grammar is not None:
            kind, text = sampling.grammar
            if kind == "lark":
                raise InvalidRequest("a Lark grammar: SGLang does not offer that; send a JSON schema or a regex")
            params[kind] = text
        body: dict[str, Any] = {"input_ids": call.tokens.tolist(), "sampling_params": params, "stream": True}
        body["rid"] = call.name
        if sampling.num_logprobs is not None:
            body |= {"return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": sampling.num_logprobs}
        if request.priority:
            body["priority"] = request.priority
        if call.cache_salt:
            body["cache_salt"] = call.cache_salt
        if call.adapter:
            body["lora_path"] = call.adapter
        return body

    def stream(self, call: EngineCall) -> SglangStream:
        """Return the reader of the answer."""
        return SglangStream(call.name)

    def figures(self, samples: Samples) -> EngineFigures:
        """Return the load from metrics, which exist with ``--enable-metrics``."""
        own = [each for each in samples if each[0].startswith("sglang:")]
        usage = [value for name, _, value in own if name == "sglang:token_usage"]
        return EngineFigures(
            int(sum(value for name, _, value in own if name == "sglang:num_running_reqs")),
            int(sum(value for name, _, value in own if name == "sglang:num_queue_reqs")),
            sum(usage) / len(usage) if usage else 0.0,
            hash(tuple((name, value) for name, _, value in own)) if own else None,
        )

    async def facts(self, client: EngineClient) -> ServerFacts:
        """Read ``/v1/models`` and ``/server_info``. Raises NodeUnavailable."""
        server = client.server
        try:
            listed = msgspec.json.decode(await client.get("/v1/models"), type=ListedModels).data
            info = msgspec.json.decode(await client.get("/server_info"), type=_Info)
        except msgspec.MsgspecError as error:
            raise NodeUnavailable(f"{server.url} does not describe itself as SGLang does: {error}") from error
        base = next((each for each in listed if not each.parent), None)
        adapters = [each.id for each in listed if each.parent]
        context = (base.max_model_len if base is not None else None) or info.context_length
        if base is None or not context or (server.adapter and server.adapter not in adapters):
            raise NodeUnavailable(f"{server.url} serves no model {server.adapter}, or states no context length")
        page = info.page_size or 1
        block = page if page >= MIN_PAGE else _OWN_BLOCK
        model = ModelFacts(server.adapter or base.id, info.model_path or base.root or base.id, context, block)
        events, replay = await event_sources(client) if server.events else _sources(client, info, page)
        return ServerFacts(
            model,
            (info.max_total_num_tokens or 0) // block,
            info.max_running_requests or 0,
            events,
            replay,
            adapters,
            not info.disable_radix_cache,
        )

    def probe(self, model: str) -> dict[str, Any]:
        """Return a request for one token."""
        return {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}

    def exactness(self, sampling: Sampling, seeded: bool) -> str:
        """As vLLM's, and its repetition penalty counts a request's own output alone."""
        if sampling.grammar is not None:
            return IMPOSSIBLE
        draws = sampling.temperature > 0 and not seeded
        is_exact = not draws and not sampling.presence_penalty and sampling.repetition_penalty == 1.0
        return SAME_MODEL if is_exact else SAME_DISTRIBUTION


def _sources(client: EngineClient, info: _Info, page: int) -> tuple[str, str]:
    found = info.kv_events
    if found is None or not found.endpoint_port_base or page < MIN_PAGE or (info.dp_size or 1) > 1:
        return "", ""
    host = found.endpoint_host or "*"
    replay = found.replay_endpoint_port_base
    events = reached(f"tcp://{host}:{found.endpoint_port_base}", client.server)
    return events, reached(f"tcp://{host}:{replay}", client.server) if replay else ""
