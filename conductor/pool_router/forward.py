"""Forwarding: a request to the conductors of its pools, the answer streamed back as it comes.

Owns the HTTP client and the order of attempts. Where prefill and decode pool differ, the prefill pool first computes
the prompt for one token and so leaves its KV in the store that the pools share; the decode pool then finds it there.
Should that fail, the decode pool computes the prompt itself: nothing is lost but time.

An attempt that ended before its answer began (no connection, no sign of life, 429, 503) is repeated at the next
conductor, then at the pools that stand in. What has begun is never repeated.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import httpx
import structlog

from tanghulu.conductor.pool_router.demand import demand_of, parse_body, prefill_only
from tanghulu.conductor.pool_router.grid import PoolMap
from tanghulu.conductor.pool_router.members import Member, Members
from tanghulu.conductor.pool_router.metrics import PoolMetrics
from tanghulu.conductor.pool_router.relaying import (
    CONNECT_TIMEOUT_S,
    TRY_ELSEWHERE,
    UNREACHABLE,
    RelayClient,
    reason,
    request_headers,
)
from tanghulu.conductor.pool_router.streamed import PoolAnswer
from tanghulu.errors import NodeUnavailable
from tanghulu.runtime.clock import Clock
from tanghulu.web.errors import ResponseNotFound

_log = structlog.get_logger(__name__)
#: How long every conductor may take for a question to all.
ASK_S = 5.0


class Forwarder:
    """Sends requests to pools."""

    def __init__(self, pools: PoolMap, clock: Clock, metrics: PoolMetrics, client: RelayClient) -> None:
        self.pools = pools
        self.members = {name: Members(pool.urls) for name, pool in pools.pools.items()}
        self._clock, self._metrics = clock, metrics
        self._client = client

    async def aclose(self) -> None:
        await self._client.close()

    async def generate(self, path: str, body: bytes, headers: Mapping[str, str]) -> PoolAnswer:
        """Forward a generation by the grid. Raises InvalidRequest, or NodeUnavailable if no pool can be reached.

        One that goes on from an earlier response goes to the conductor that keeps it.
        """
        data = parse_body(body)
        if isinstance(earlier := data.get("previous_response_id"), str):
            return await self.where_kept(earlier, "POST", path, body, headers)
        prefill, decode = self.pools.choose(demand_of(data, self.pools.characters_per_token))
        if "slo" in data:  # a field of this router, which conductors do not know
            body = json.dumps({name: value for name, value in data.items() if name != "slo"}).encode()
        prefilled = prefill
        if prefill != decode:
            first = await self._send(prefill, "POST", path, json.dumps(prefill_only(data)).encode(), headers)
            if first is not None:
                prefilled = first.pool
                await self._finish(first)
            else:
                self._metrics.unprimed.inc()
        answer = await self._send(decode, "POST", path, body, headers)
        if answer is None:
            raise NodeUnavailable(f"no conductor of pool {decode!r} can be reached, and none that stands in for it")
        self._metrics.requests.labels(prefilled, answer.pool).inc()
        return replace(answer, more={"x-tanghulu-prefill-pool": prefilled, "x-tanghulu-pool": answer.pool})

    async def anywhere(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> PoolAnswer:
        """Forward a request that any pool can answer, to the next one after a 404.

        Raises NodeUnavailable if none can be reached.
        """
        missing = None
        for name in self.pools.pools:
            answer = await self._send(name, method, path, body, headers)
            if answer is None:
                continue
            answer = replace(answer, more={"x-tanghulu-pool": answer.pool})
            if answer.response.status_code != 404:
                return answer
            missing = replace(answer, content=await self._finish(answer))
        if missing is None:
            raise NodeUnavailable("no conductor of any pool can be reached")
        return missing

    async def where_kept(
        self, response_id: str, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> PoolAnswer:
        """Forward a request to the conductor that keeps a response. Raises InvalidRequest if none does."""
        where = f"/v1/responses/{quote(response_id, safe='')}"
        for pool, member, status, _ in await self._everywhere("GET", where, b"", headers):
            if status != 200:
                continue
            response = await self._try(member, method, path, body, headers)
            if response is not None:
                pieces = self._client.pieces(response)
                return PoolAnswer(pool, member, response, pieces, more={"x-tanghulu-pool": pool})
        raise ResponseNotFound(
            f"response {response_id[:64]!r} is kept by no conductor that answers; send the whole conversation as input"
        )

    async def everywhere(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> list[tuple[str, int, Any]]:
        """(pool, status, JSON) of every conductor that answers."""
        found = await self._everywhere(method, path, body, headers or {})
        return [(pool, status, answer) for pool, _, status, answer in found]

    async def _everywhere(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> list[tuple[str, Member, int, Any]]:
        now_s, shown = self._clock.now_s(), request_headers(headers)

        async def ask(pool: str, member: Member) -> tuple[str, Member, int, Any]:
            try:
                response = await self._client.ask(method, member.url + path, body, shown, ASK_S)
                return pool, member, response.status_code, response.json()
            except (*UNREACHABLE, ValueError, RecursionError):
                return pool, member, 503, None

        asked = [ask(name, each) for name, members in self.members.items() for each in members.in_order(now_s)]
        return await asyncio.gather(*asked)

    async def end(self, answer: PoolAnswer) -> None:
        """End a forwarded request: its answer was passed on, or its client is gone."""
        if answer.content is None:
            answer.member.open_requests -= 1
            await answer.response.aclose()

    async def _send(
        self, pool: str, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> PoolAnswer | None:
        """The first answer of ``pool`` or of its fallbacks; the last refusal if all refuse, None if all fail."""
        refusal = None
        for name, member in self._attempts(pool):
            response = await self._try(member, method, path, body, headers)
            if response is None:
                continue
            answer = PoolAnswer(name, member, response, self._client.pieces(response))
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
        if member.num_failures and not await self._client.lives(member.url, CONNECT_TIMEOUT_S):
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
        except BaseException:  # a client that hung up, too: the request is not open any more; raised on
            member.open_requests -= 1
            raise
        if response.status_code in (502, 503):
            member.failed(self._clock.now_s())
        else:
            member.served()
        return response

    async def _finish(self, answer: PoolAnswer) -> bytes:
        """Read the answer to its end and close; returns its content."""
        content = b"" if answer.content is None else answer.content
        try:
            if answer.content is None:
                async for piece in answer.pieces:
                    content += piece
        except httpx.HTTPError as error:
            _log.warning("pool.answer_broke", url=answer.member.url, error=reason(error))
        finally:
            await self.end(answer)
        return content
