"""Generate: the routing service sends a request to the worker it would choose, and relays the answer.

For engines with an HTTP API of their own (SGLang's /generate, or any that takes token ids under ``input_ids``). The
body is forwarded unchanged, except for ``routing``, which is for the service. The request counts as load from its
sending to its end; its prefill ends with the first bytes of the answer. It goes to one worker that does both phases:
hand-overs inside an engine are its own concern. A worker that cannot be reached, is silent, or returns 429 or 503
before it begins, is skipped for this request; at most MAX_ATTEMPTS are tried.
"""

from __future__ import annotations

import functools
import json
import uuid
from collections.abc import AsyncIterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import httpx

from tanghulu.conductor.pool_router.demand import is_token_ids, parse_body
from tanghulu.conductor.pool_router.relaying import (
    TRY_ELSEWHERE,
    UNREACHABLE,
    RelayClient,
    RelayedAnswer,
    answer_headers,
)
from tanghulu.conductor.routing_service.api import RouterApi, overrides_of
from tanghulu.conductor.routing_service.service import RoutableWorker, RoutingClient, RoutingQuery
from tanghulu.conductor.text.preparing import INLINE_BYTES, made_ready
from tanghulu.errors import InvalidRequest, NodeUnavailable
from tanghulu.hashing import BlockExtras, as_tokens
from tanghulu.rpc.http_clients import reason
from tanghulu.runtime.clock import Clock
from tanghulu.types import InstanceId

MAX_ATTEMPTS = 3
WORKER_HEADER = "x-tanghulu-worker"


@dataclass(frozen=True, slots=True)
class _ParsedGenerate:
    request_id: str
    query: RoutingQuery
    body: bytes


class Generator:
    """Forwards to the workers of ``service`` that have a URL."""

    def __init__(self, api: RouterApi, clock: Clock, client: RelayClient) -> None:
        self._api, self._service, self._clock, self._client = api, api.service, clock, client

    async def aclose(self) -> None:
        await self._client.close()

    async def generate(self, body: bytes, caller: RoutingClient) -> RelayedAnswer:
        """Send ``body`` (JSON) to the best worker. Raises InvalidRequest for a malformed body, NodeUnavailable."""
        parsed = await made_ready(len(body) > INLINE_BYTES, self._read, body, caller)
        tried: dict[InstanceId, str] = {}
        while True:
            target = self._pick(parsed.query, tried)
            now_s = self._clock.now_s()
            self._service.add_request(parsed.request_id, parsed.query, target.id, target.id, now_s)
            try:
                response = await self._send(target, parsed.body)
            except BaseException as error:  # a disconnected client, too: its load is removed; re-raised
                self._service.free(parsed.request_id, caller)
                if not isinstance(error, (*UNREACHABLE, NodeUnavailable)):
                    raise
                tried[target.id] = reason(error)
                continue
            others = self._with_urls({*tried, target.id})
            if response.status_code in TRY_ELSEWHERE and len(tried) + 1 < MAX_ATTEMPTS and others:
                self._end(parsed, response)
                tried[target.id] = f"it answered {response.status_code}"
                continue
            headers = {**answer_headers(response), WORKER_HEADER: target.id}
            end = functools.partial(self._end, parsed, response)
            return RelayedAnswer(response.status_code, headers, self._pieces(parsed, response), end)

    async def _pieces(self, parsed: _ParsedGenerate, response: httpx.Response) -> AsyncIterator[bytes]:
        async for piece in self._client.pieces(response, "the worker"):
            self._service.prefill_completed(parsed.request_id, self._clock.now_s(), parsed.query.caller)
            yield piece

    def _end(self, parsed: _ParsedGenerate, response: httpx.Response) -> None:
        """Free the request at once, then close the connection."""
        self._service.free(parsed.request_id, parsed.query.caller)
        self._client.end(response)

    async def _send(self, target: RoutableWorker, body: bytes) -> httpx.Response:
        url = httpx.URL(target.url)
        headers = {"content-type": "application/json", "host": url.netloc.decode()}
        *others, last = await self._service.networks.addresses_of(url.host)
        for address in (*others, last):
            at = url.copy_with(host=address, path="/generate")
            request = self._client.request("POST", at, body, headers, url.host)
            try:
                return await self._client.send(request)
            except httpx.ConnectError:
                if address == last:
                    raise
        raise AssertionError("the last one answers or raises")

    def _pick(self, query: RoutingQuery, tried: Mapping[InstanceId, str]) -> RoutableWorker:
        if len(tried) < MAX_ATTEMPTS:
            best = self._service.ranked(self._with_urls(tried.keys()), query, self._clock.now_s())
            if best:
                return best[0]
        reasons = (
            "; ".join(f"{worker}: {why}" for worker, why in tried.items()) or "none has a url and does both phases"
        )
        raise NodeUnavailable(f"no worker took the request: {reasons}")

    def _with_urls(self, passed_over: Set[InstanceId]) -> list[RoutableWorker]:
        return [
            t for t in self._service.workers if t.url and t.role.prefills and t.role.decodes and t.id not in passed_over
        ]

    def _read(self, body: bytes, caller: RoutingClient) -> _ParsedGenerate:
        given = parse_body(body)
        ids = given.get("input_ids")
        if not is_token_ids(ids):
            raise InvalidRequest(
                "/generate requires input_ids, a list of token ids: the routing service has no tokenizer"
            )
        overrides = overrides_of(given.pop("routing", {}), "routing: ")
        rid = given.get("rid")
        request_id = rid if isinstance(rid, str) and rid else uuid.uuid4().hex
        query = self._api.query(as_tokens(ids), overrides, str(given.get("session", "")), caller, _extras(given))
        return _ParsedGenerate(request_id, query, json.dumps(given).encode())


def _extras(given: Mapping[str, Any]) -> BlockExtras:
    """Return what a body of /generate has besides tokens; of media, whose places are unknown, any marks all blocks."""
    parts = [given.get(name) or "" for name in ("cache_salt", "extra_key", "image_data", "video_data", "audio_data")]
    salt = json.dumps(parts) if any(parts) else ""
    return BlockExtras(salt, str(given.get("lora_path") or ""))
