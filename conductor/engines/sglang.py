"""SGLang's HTTP API: token ids to ``/generate`` and back, its descriptions of itself.

A stream's events carry all tokens so far, or with ``--incremental-streaming-output`` the new ones; in both, the last
``completion_tokens - n`` ids of an event are new after n. Example: with [5], then [5, 8] and 2 completion tokens, 8 is
new; and so with [8] and 2.
"""

from __future__ import annotations

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
from tanghulu.errors import InvalidRequest, NodeUnavailable
from tanghulu.rpc.wire import U32
from tanghulu.runtime.kv_endpoints import NO_EVENTS, EventEndpoints
from tanghulu.session.outputs import TokenLogprobs

#: Smallest page whose events are followed; with smaller ones, blocks of _OWN_BLOCK tokens are assumed instead.
MIN_PAGE, _OWN_BLOCK = 8, 64
#: Its names of sampling parameters that have others in vLLM.
_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}


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


class _Event(msgspec.Struct):
    output_ids: list[U32] = []
    meta_info: _Meta = msgspec.field(default_factory=_Meta)
    error: StreamError | None = None


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


class SglangStream(EngineAnswer):
    """Reads the events of one answer of ``/generate``."""

    def __init__(self, server: str, num_top: int = 0) -> None:
        super().__init__(server, num_top)
        self._num_seen = 0

    def read(self, data: bytes, piece: AnswerPiece) -> None:
        """Add the event's contents."""
        event = decoded(data, _Event, self.server)
        if event.error is not None:
            self.fail_with(event.error)
        meta, end = event.meta_info, event.meta_info.finish_reason
        num_new = meta.completion_tokens - self._num_seen
        if not 0 <= num_new <= len(event.output_ids):
            raise NodeUnavailable(f"{self.server} left out tokens after the first {self._num_seen}")
        self._num_seen += num_new
        piece.tokens += event.output_ids[len(event.output_ids) - num_new :]
        piece.logprobs += _logprobs(meta, num_new)
        if meta.cached_tokens is not None:
            piece.cached_tokens = meta.cached_tokens
        if end is not None:
            if end.type == "abort":
                self.fail_with(StreamError(f"abort {end.message}".strip(), end.status_code))
            piece.finish = self.finish(end.type)


def _logprobs(meta: _Meta, num_new: int) -> list[TokenLogprobs]:
    own, top = (each[-num_new:] if num_new else [] for each in (meta.output_token_logprobs, meta.output_top_logprobs))
    made = []
    for first, more in zip(own, top or [None] * len(own), strict=False):
        entries = [first, *(more or [])]
        values = tuple(LEAST_LOGPROB if value is None else value for value, _, _ in entries)
        made.append(TokenLogprobs(tuple(token for _, token, _ in entries), values))
    return made


class SglangDialect(EngineDialect):
    """SGLang's own door, which takes and gives token ids; its metrics exist with ``--enable-metrics``."""

    engine, prefix = "sglang", "sglang:"
    generate_path, health_path, drop_path = "/generate", "/ready", "/flush_cache"
    gauges = ("num_running_reqs", "num_queue_reqs", "token_usage")
    #: A draining server is not ready, and finishes what it has. Its repetition penalty counts the answer alone.
    ends_unhealthy = repeats_exactly = False
    stream = SglangStream

    def body(self, call: EngineCall) -> dict[str, Any]:
        """Return the body of a request. Raises InvalidRequest for a Lark grammar."""
        sampling = call.request.sampling
        params = {_NAMES.get(name, name): value for name, value in call.sampling().items()}
        if sampling.grammar is not None:
            kind, text = sampling.grammar
            if kind == "lark":
                raise InvalidRequest("SGLang does not support Lark grammars; send a JSON schema or a regex")
            params[kind] = text
        more = {"priority": call.request.priority, "cache_salt": call.cache_salt, "lora_path": call.adapter}
        if sampling.num_logprobs is not None:
            more |= {"return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": sampling.num_logprobs}
        body = {"input_ids": call.tokens.tolist(), "sampling_params": params, "stream": True, "rid": call.name}
        return body | {name: value for name, value in more.items() if value}

    async def facts(self, client: EngineClient) -> ServerFacts:
        """Read ``/v1/models`` and ``/server_info``."""
        name, root, context, adapters = await served_models(client)
        info = decoded(await client.call("/server_info"), _Info, client.server.url)
        page = info.page_size or 1
        block = page if page >= MIN_PAGE else _OWN_BLOCK
        if not (context or info.context_length):
            raise NodeUnavailable(f"{client.server.url} does not state the context length of {name}")
        root, context = info.model_path or root, context or info.context_length or 0
        events = client.server.event_endpoints if client.server.events else _endpoints(client, info, page)
        num_blocks, most = (info.max_total_num_tokens or 0) // block, info.max_running_requests or 0
        return ServerFacts(name, root, context, block, num_blocks, most, events, adapters, not info.disable_radix_cache)

    def probe(self, model: str) -> dict[str, Any]:
        """Return a request for one token."""
        return {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}


def _endpoints(client: EngineClient, info: _Info, page: int) -> EventEndpoints:
    found = info.kv_events
    if found is None or not found.endpoint_port_base or page < MIN_PAGE or (info.dp_size or 1) > 1:
        return NO_EVENTS
    ports = found.endpoint_port_base, found.replay_endpoint_port_base
    return EventEndpoints(*(f"tcp://{found.endpoint_host or '*'}:{port}" for port in ports)).at(
        client.server.address.host
    )
