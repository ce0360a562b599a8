"""Forwarding: send a request to the conductors of its pools and stream the answer back.

Owns the HTTP client and the order of attempts. If prefill and decode pool differ, the prefill pool first computes the
prompt for one token, leaving its KV in the store shared by the pools; the decode pool then finds it there. If that
fails, the decode pool computes the prompt itself: only time is lost.

An attempt that ended before its answer began (no connection, no sign of life, 429, 503) is repeated at the next
conductor, then at the fallback pools. An answer that has begun is never repeated.

Of a pool's conductors, the one with the fewest open requests is tried first. One that failed is skipped for a time that
doubles with each consecutive failure, but is tried anyway if no other is left. Example: it is skipped for 0.5 s after
one failure, 2 s after three, never more than 30 s.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

import httpx
import structlog
from prometheus_client import CollectorRegistry, Counter

from tanghulu.conductor.pool_router.demand import demand_of, parse_body, prefill_only
from tanghulu.conductor.pool_router.grid import PoolMap
from tanghulu.conductor.pool_router.relaying import (
    TRY_ELSEWHERE,
    UNREACHABLE,
    RelayClient,
    RelayedAnswer,
    answer_headers,
    request_headers,
)
from tanghulu.conductor.text.preparing import INLINE_BYTES, made_ready
from tanghulu.errors import NodeUnavailable
from tanghulu.rpc.http_clients import CONNECT_TIMEOUT_S, reason
from tanghulu.runtime.clock import Clock
from tanghulu.types import InstanceId
from tanghulu.web.errors import ResponseNotFound

FIRST_REST_S = 0.5
MOST_REST_S = 30.0


@dataclass(slots=True, eq=False)
class Member:
    """One conductor. ``open_requests`` have been forwarded to it and have not ended."""

    url: str
    open_requests: int = 0
    num_failures: int = 0
    rests_until_s: float = 0.0

    def failed(self, now_s: float) -> None:
        """Record that the conductor could not be reached, or answered that it cannot serve."""
        self.num_failures += 1
        self.rests_until_s = now_s + min(MOST_REST_S, FIRST_REST_S * 2 ** min(10, self.num_failures - 1))

    def served(self) -> None:
        self.num_failures, self.rests_until_s = 0, 0.0


class Members:
    """The conductors of one pool: configured ones, and those found by Discovery."""

    def __init__(self, urls: Iterable[str] = ()) -> None:
        self._fixed = [Member(url) for url in urls]
        self._found: dict[InstanceId, Member] = {}

    def __len__(self) -> int:
        return len(self._fixed) + len(self._found)

    def add(self, instance: InstanceId, url: str) -> None:
        """Add a conductor found by Discovery; a known address adds nothing."""
        known = self._found.get(instance)
        if known is None or known.url != url:
            self._found[instance] = Member(url)

    def remove(self, instance: InstanceId) -> None:
        """Remove a conductor that has left; requests forwarded to it continue or fail by themselves."""
        self._found.pop(instance, None)

    def in_order(self, now_s: float) -> list[Member]:
        """Return all conductors in the order in which to try them; each address once."""
        by_url = {member.url: member for member in [*self._found.values(), *self._fixed]}
        return sorted(by_url.values(), key=lambda m: (max(m.rests_until_s, now_s), m.open_requests))


_PREFIX = "tanghulu_router_"


class PoolMetrics:
    """Counters of forwarded requests."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(_PREFIX + name, text, labels, registry=registry)

        self.requests = counter("requests", "Generations, by the pools that served them", "prefill", "decode")
        self.retries = counter("retries", "Attempts that a conductor refused (429, 502, 503)", "pool")
        self.unprimed = counter("unprimed", "Generations whose prefill pool failed: decode did the whole")


_log = structlog.get_logger(__name__)
#: Timeout of each conductor for a request to all of them.
ASK_S = 5.0


@dataclass(frozen=True, slots=True)
class _PoolAnswer:
    """An answer that has begun, and its conductor; ``content``: all of it, if already read."""

    pool: str
    member: Member
    response: httpx.Response
    content: bytes | None = None


class Forwarder:
    """Sends requests to pools."""

    def __init__(self, pools: PoolMap, clock: Clock, metrics: PoolMetrics, client: RelayClient) -> None:
        self.pools = pools
        self.members = {name: Members(pool.urls) for name, pool in pools.pools.items()}
        self._clock, self._metrics = clock, metrics
        self._client = client

    async def aclose(self) -> None:
        await self._client.close()

    async def generate(self, path: str, body: bytes, headers: Mapping[str, str]) -> RelayedAnswer:
        """Forward a generation by the grid. Raises InvalidRequest, or NodeUnavailable if no pool can be reached.

        One that continues an earlier response goes to the conductor that keeps it.
        """
        data = await made_ready(len(body) > INLINE_BYTES, parse_body, body)
        demand = demand_of(data, self.pools.characters_per_token)
        if data.pop("slo", ...) is not ...:  # a field of this router, unknown to conductors
            body = json.dumps(data).encode()
        if isinstance(earlier := data.get("previous_response_id"), str):
            return await self.where_kept(earlier, "POST", path, body, headers)
        prefill, decode = self.pools.choose(demand)
        prefilled = prefill
        if prefill != decode:
            first = await self._send(prefill, "POST", path, json.dumps(prefill_only(data)).encode(), headers)
            if first is not None:
                prefilled = first.pool
                await self._finish(first)
            if first is None or first.response.status_code != 200:
                self._metrics.unprimed.inc()
        answer = await self._send(decode, "POST", path, body, headers)
        if answer is None:
            raise NodeUnavailable(f"no conductor of pool {decode!r} or of its fallback pools can be reached")
        self._metrics.requests.labels(prefilled, answer.pool).inc()
        return self._relayed(answer, {"x-tanghulu-prefill-pool": prefilled})

    async def anywhere(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> RelayedAnswer:
        """Forward a request that any pool can answer, trying the next one after a 404.

        Raises NodeUnavailable if none can be reached.
        """
        missing = None
        for name in self.pools.pools:
            answer = await self._send(name, method, path, body, headers)
            if answer is None:
                continue
            if answer.response.status_code != 404:
                return self._relayed(answer)
            missing = replace(answer, content=await self._finish(answer))
        if missing is None:
            raise NodeUnavailable("no conductor of any pool can be reached")
        return self._relayed(missing)

    async def where_kept(
        self, response_id: str, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> RelayedAnswer:
        """Forward a request to the conductor that keeps a response. Raises InvalidRequest if none does."""
        where = f"/v1/responses/{quote(response_id, safe='')}"
        for pool, member, status, _ in await self.everywhere("GET", where, b"", headers):
            if status != 200:
                continue
            response = await self._try(member, method, path, body, headers)
            if response is not None:
                return self._relayed(_PoolAnswer(pool, member, response))
        raise ResponseNotFound(
            f"no reachable conductor stores response {response_id[:64]!r}; send the whole conversation as input"
        )

    async def everywhere(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> list[tuple[str, Member, int, Any]]:
        """Return (pool, conductor, status, JSON) of every conductor; status 503 if it cannot be reached."""
        now_s, shown = self._clock.now_s(), request_headers(headers)

        async def ask(pool: str, member: Member) -> tuple[str, Member, int, Any]:
            try:
                response = await self._client.exchange(method, member.url + path, body, shown, ASK_S)
                return pool, member, response.status_code, response.json()
            except (*UNREACHABLE, ValueError, RecursionError):
                return pool, member, 503, None

        asked = [ask(name, each) for name, members in self.members.items() for each in members.in_order(now_s)]
        return await asyncio.gather(*asked)

    def _relayed(self, answer: _PoolAnswer, more: Mapping[str, str] = MappingProxyType({})) -> RelayedAnswer:
        """Return ``answer`` for the client, with ``more`` headers."""
        headers = {**answer_headers(answer.response), **more, "x-tanghulu-pool": answer.pool}
        return RelayedAnswer(
            answer.response.status_code, headers, self._pieces(answer), functools.partial(self._end, answer)
        )

    async def _pieces(self, answer: _PoolAnswer) -> AsyncIterator[bytes]:
        if answer.content is not None:
            yield answer.content
            return
        async for piece in self._client.pieces(answer.response, f"the conductor of pool {answer.pool}"):
            yield piece

    def _end(self, answer: _PoolAnswer) -> None:
        """End a forwarded request: its answer was passed on, or its client has left."""
        if answer.content is None:
            answer.member.open_requests -= 1
            self._client.end(answer.response)

    async def _send(
        self, pool: str, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> _PoolAnswer | None:
        """Return the first answer of ``pool`` or its fallbacks; the last refusal if all refuse, None if all fail."""
        refusal = None
        for name, member in self._attempts(pool):
            response = await self._try(member, method, path, body, headers)
            if response is None:
                continue
            answer = _PoolAnswer(name, member, response)
            if response.status_code not in TRY_ELSEWHERE:
                return answer
            refusal = replace(answer, content=await self._finish(answer))
            self._metrics.retries.labels(name).inc()
        return refusal

    def _attempts(self, pool: str) -> Iterator[tuple[str, Member]]:
        for name in self.pools.ways(pool):
            for member in self.members[name].in_order(self._clock.now_s()):
                yield name, member

    async def _try(
        self, member: Member, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> httpx.Response | None:
        if member.num_failures and not await self._client.is_alive(member.url, CONNECT_TIMEOUT_S):
            member.failed(self._clock.now_s())
            return None
        request = self._client.request(method, member.url + path, body, request_headers(headers))
        member.open_requests += 1
        try:
            response = await self._client.send(request)
        except UNREACHABLE as error:
            member.open_requests -= 1
            member.failed(self._clock.now_s())
            _log.warning("pool.conductor_failed", url=member.url, error=reason(error))
            return None
        except BaseException:  # a disconnected client, too: the request is no longer open; re-raised
            member.open_requests -= 1
            raise
        if response.status_code in (502, 503):
            member.failed(self._clock.now_s())
        else:
            member.served()
        return response

    async def _finish(self, answer: _PoolAnswer) -> bytes:
        """Read the answer to its end and close; return its content as far as it arrived."""
        content = b""
        try:
            async for piece in self._pieces(answer):
                content += piece
        except NodeUnavailable:
            pass  # only the part received so far exists
        finally:
            self._end(answer)
        return content
