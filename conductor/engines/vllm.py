"""vLLM's HTTP API: token ids to ``/v1/completions`` and back, its metrics, its descriptions of itself. Pure."""

from __future__ import annotations

from collections.abc import Mapping
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
from tanghulu.conductor.engines.servers import EngineServer
from tanghulu.errors import NodeUnavailable
from tanghulu.rpc.wire import U32
from tanghulu.runtime.scraping import Samples, samples_in
from tanghulu.session.outputs import FinishReason, TokenLogprobs
from tanghulu.session.sampling import Sampling
from tanghulu.types import Address

#: Our names of grammars -> vLLM's ``structured_outputs``.
_GRAMMARS = {"json_schema": "json", "regex": "regex", "lark": "grammar"}
MAX_SEED = 1 << 63
_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "repetition": FinishReason.STOP}
_TOKEN = "token_id:"


class _Logprobs(msgspec.Struct):
    tokens: list[str] = []
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


class _Error(msgspec.Struct):
    message: str = ""
    code: int | str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None
    kv_transfer_params: dict[str, Any] | None = None


class _Model(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class ListedModels(msgspec.Struct):
    """The answer of ``/v1/models``."""

    data: list[_Model]


class _Source(msgspec.Struct):
    endpoint: str | None = None
    replay_endpoint: str | None = None


class VllmStream:
    """Reads the events of one answer of ``/v1/completions``, or the whole answer without streaming."""

    def __init__(self, server: str) -> None:
        self._server = server

    def read(self, data: bytes) -> Piece:
        """Return the event's contents."""
        try:
            event = msgspec.json.decode(data, type=_Event)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise NodeUnavailable(f"worker {self._server} sent an event that is none of vLLM's: {error}") from error
        if event.error is not None:
            code = event.error.code if isinstance(event.error.code, int) else 500
            raise error_of(code, event.error.message, self._server)
        details = event.usage.prompt_tokens_details if event.usage is not None else None
        piece = Piece(cached_tokens=details.cached_tokens if details is not None else None)
        piece.kv_transfer = event.kv_transfer_params
        for choice in event.choices:
            piece.tokens += choice.token_ids or []
            piece.logprobs += _logprobs(choice)
            if choice.finish_reason is not None:
                piece.finish = self._finish(choice.finish_reason)
        return piece

    def _finish(self, reason: str) -> FinishReason:
        if reason not in _FINISH:
            raise NodeUnavailable(f"worker {self._server} ended the request early: {reason}")
        return _FINISH[reason]


def _logprobs(choice: _Choice) -> list[TokenLogprobs]:
    given, tokens = choice.logprobs, choice.token_ids or []
    if given is None or not tokens:
        return []
    made = []
    for at, token in enumerate(tokens):
        own = given.token_logprobs[at] if at < len(given.token_logprobs) else None
        top = (given.top_logprobs or [])[at : at + 1]
        best = sorted(((top[0] if top else None) or {}).items(), key=lambda each: -each[1])
        ids = [(int(name.removeprefix(_TOKEN)), value) for name, value in best if name.startswith(_TOKEN)]
        entries = [(token, own if own is not None else float("-inf")), *ids]
        made.append(TokenLogprobs(tuple(each for each, _ in entries), tuple(value for _, value in entries)))
    return made


def sampling_of(call: EngineCall) -> dict[str, Any]:
    """Return the fields of sampling that both engines call alike, each explicit: servers' defaults differ."""
    sampling, stop = call.request.sampling, call.request.stop
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "stop_token_ids": list(stop.stop_token_ids),
        "ignore_eos": stop.ignore_eos,
    }


class VllmDialect:
    """``/v1/completions`` with token ids: every version and every server has it."""

    engine = "vllm"
    generate_path, health_path, drop_path = "/v1/completions", "/health", "/reset_prefix_cache"
    ends_unhealthy = True

    def body(self, call: EngineCall) -> dict[str, Any]:
        """Return the body; nothing is left to the server's defaults."""
        sampling, request = call.request.sampling, call.request
        body: dict[str, Any] = {
            "model": call.model,
            "prompt": call.tokens.tolist(),
            "return_token_ids": True,
            "max_tokens": call.max_tokens,
            "min_tokens": call.min_tokens,
            "stream": not call.hand_over,
            **sampling_of(call),
        }
        if not call.hand_over:
            body["stream_options"] = {"include_usage": True}
        if bias := call.logit_bias:
            body["logit_bias"] = bias
        if sampling.seed is not None and call.seeded:
            body["seed"] = sampling.seed % MAX_SEED
        if sampling.num_logprobs is not None:
            body |= {"logprobs": sampling.num_logprobs, "return_tokens_as_token_ids": True}
        if sampling.grammar is not None:
            kind, text = sampling.grammar
            body["structured_outputs"] = {_GRAMMARS[kind]: text}
        if request.priority:
            body["priority"] = -request.priority  # the lower runs first there
        if call.cache_salt:
            body["cache_salt"] = call.cache_salt
        if call.full_report:
            body["vllm_xargs"] = {"kv_cache_report_mode": "full"}
        if call.kv_transfer is not None:
            body["kv_transfer_params"] = call.kv_transfer
        return body

    def stream(self, call: EngineCall) -> VllmStream:
        """Return the reader of the answer."""
        return VllmStream(call.name)

    def figures(self, samples: Samples) -> EngineFigures:
        """Return the load from metrics; those of several ranks are summed, the share in use is their mean."""
        own = [each for each in samples if each[0].startswith("vllm:")]
        usage = [value for name, _, value in own if name == "vllm:kv_cache_usage_perc"]
        return EngineFigures(
            int(sum(value for name, _, value in own if name == "vllm:num_requests_running")),
            int(sum(value for name, _, value in own if name == "vllm:num_requests_waiting")),
            sum(usage) / len(usage) if usage else 0.0,
            hash(tuple((name, value) for name, _, value in own)) if own else None,
        )

    async def facts(self, client: EngineClient) -> ServerFacts:
        """Return the server's description of itself."""
        return await vllm_facts(client)

    def probe(self, model: str) -> dict[str, Any]:
        """Return a request for one token."""
        return {"model": model, "prompt": [0], "max_tokens": 1, "temperature": 0.0, "cache_salt": "tanghulu probe"}

    def exactness(self, sampling: Sampling, seeded: bool) -> str:
        """A grammar begins anew; a presence penalty and draws without seeds cannot be continued exactly."""
        if sampling.grammar is not None:
            return IMPOSSIBLE
        frequency = sampling.frequency_penalty != 0.0 and sampling.repetition_penalty != 1.0
        if (sampling.temperature > 0 and not seeded) or sampling.presence_penalty or frequency:
            return SAME_DISTRIBUTION
        return SAME_MODEL


async def vllm_facts(client: EngineClient) -> ServerFacts:
    """Read ``/v1/models``, the metrics and, in newer versions, ``/kv_event_sources``. Raises NodeUnavailable."""
    server = client.server
    models, page = await client.get("/v1/models"), await client.get("/metrics", optional=True)
    samples = samples_in(page.decode(errors="replace"))
    config: Mapping[str, str] = next((labels for name, labels, _ in samples if name == "vllm:cache_config_info"), {})
    try:
        listed = msgspec.json.decode(models, type=ListedModels).data
    except msgspec.MsgspecError as error:
        raise NodeUnavailable(f"{server.url} has no list of models at /v1/models: {error}") from error
    base = next((each for each in listed if not each.parent), None)
    adapters = [each for each in listed if each.parent]
    one = next((each for each in adapters if each.id == server.adapter), None) if server.adapter else base
    if one is None or base is None:
        raise NodeUnavailable(f"{server.url} serves no model {server.adapter or 'at all'}")
    blocks = config.get("num_gpu_blocks", "")
    block_tokens = config.get("block_size", "")
    model = ModelFacts(
        one.id,
        base.root or base.id,
        base.max_model_len or one.max_model_len or 0,
        int(block_tokens) if block_tokens.isdecimal() and int(block_tokens) else 16,
    )
    if not model.context_length:
        raise NodeUnavailable(f"{server.url} does not state the max_model_len of {one.id}")
    caches = config.get("enable_prefix_caching") != "False"
    events, replay = await event_sources(client) if caches else ("", "")
    num_blocks, names = int(blocks) if blocks.isdecimal() else 0, [each.id for each in adapters]
    return ServerFacts(model, num_blocks, events=events, replay=replay, adapters=names, caches=caches)


async def event_sources(client: EngineClient) -> tuple[str, str]:
    """Return the ZeroMQ addresses of a server's events and of their replay, "" for none: as given, or as it states."""
    given = client.server.events
    if given:
        events, _, replay = given.partition("|")
        return ("", "") if given == "no" else (events, replay)
    data = await client.get("/kv_event_sources", optional=True)
    try:
        ranks = list(msgspec.json.decode(data, type=dict[str, _Source]).values()) if data else []
    except msgspec.MsgspecError:
        ranks = []
    if len(ranks) != 1:  # several ranks have caches of their own
        return "", ""
    return reached(ranks[0].endpoint or "", client.server), reached(ranks[0].replay_endpoint or "", client.server)


def reached(endpoint: str, server: EngineServer) -> str:
    """Return a ZeroMQ endpoint as reached from here: a wildcard stands for the server's own address."""
    scheme, separator, rest = endpoint.partition("://")
    host, _, port = rest.rpartition(":")
    if not separator or scheme != "tcp" or not port.isdecimal():
        return ""
    is_wild = host in ("*", "0.0.0.0", "[::]", "::")
    return f"tcp://{Address(server.address.host, int(port)) if is_wild else rest}"
