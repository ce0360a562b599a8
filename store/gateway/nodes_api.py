"""Routes for nodes and the store as a whole: contents, draining, eviction, policies, checks."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from tanghulu.errors import DeadlineExceeded, InvalidRequest
from tanghulu.store.admin import orders, rows
from tanghulu.store.admin.check import check
from tanghulu.store.admin.rows import plain
from tanghulu.store.client.model import MAX_REPLICAS, MAX_TTL_S
from tanghulu.store.gateway.clients import KEYS_PER_PAGE
from tanghulu.store.gateway.gateway import Gateway
from tanghulu.types import MAX_VALUE_BYTES, parse_size

Row = dict[str, Any]
Keys = Annotated[list[str], Field(max_length=KEYS_PER_PAGE)]


class CheckedBody(BaseModel):
    """A body whose unknown fields are refused: a misspelt field would silently do nothing."""

    model_config = ConfigDict(extra="forbid")


class EvictBody(CheckedBody):
    """Chunks to evict: keys, or a number of bytes in the policy's order. Sizes may have a unit: "64MiB"."""

    keys: Keys = Field(default_factory=list)
    bytes: Annotated[int, Field(ge=0, le=MAX_VALUE_BYTES)] | Annotated[str, Field(max_length=24)] = 0

    def wanted(self) -> tuple[list[str], int]:
        """Return (keys, bytes); raises InvalidRequest unless exactly one of the two is given."""
        num_bytes = parse_size(self.bytes)
        if num_bytes > MAX_VALUE_BYTES or bool(self.keys) == bool(num_bytes):
            raise InvalidRequest('give either "keys" or "bytes", above 0 and at most 1 TiB')
        return self.keys, num_bytes


class PolicyBody(CheckedBody):
    """The eviction policy to switch to."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    node: str = ""


class ReplicateBody(CheckedBody):
    """Keys to copy in advance."""

    keys: Annotated[list[str], Field(min_length=1, max_length=KEYS_PER_PAGE)]
    holders: Annotated[int, Field(ge=1, le=MAX_REPLICAS)] = 2
    for_s: Annotated[float, Field(gt=0, le=MAX_TTL_S, allow_inf_nan=False)] = 60.0


def router(gateway: Gateway) -> APIRouter:
    """Return the routes."""
    api = APIRouter()

    _questions(api, gateway)
    _orders_to_one(api, gateway)
    _orders_to_all(api, gateway)
    return api


def _orders_to_one(api: APIRouter, gateway: Gateway) -> None:
    """Add the routes for one node."""

    @api.post("/v1/nodes/{node}/drain", summary="Have a node's chunks moved away", tags=["nodes"])
    async def drain(
        request: Request,
        node: str,
        wait_s: Annotated[float, Query(ge=0, description="seconds to wait until it may be stopped")] = 0.0,
    ) -> Row:
        """The node takes no new chunks from now on. Poll /v1/nodes until `drained`, or wait here (504 if too long)."""
        if wait_s > gateway.config.request_s:
            raise InvalidRequest(f"wait_s={wait_s:g} exceeds the limit of a request, {gateway.config.request_s:g} s")
        async with gateway.store(request.headers) as store:
            return await orders.drain(store, node, wait=wait_s > 0, timeout_s=wait_s)

    @api.post("/v1/nodes/{node}/undrain", summary="Have a node take chunks again", tags=["nodes"])
    async def undrain(request: Request, node: str) -> Row:
        """Undo a drain. Chunks copied away also stay where they are."""
        async with gateway.store(request.headers) as store:
            return await orders.undrain(store, node)

    @api.post("/v1/nodes/{node}/evict", summary="Let chunks of one node go", tags=["nodes"])
    async def evict(request: Request, node: str, body: EvictBody) -> Row:
        """By key, or a number of bytes in the policy's order; chunks being read or pinned hard stay."""
        async with gateway.store(request.headers) as store:
            return await orders.evict(store, node, *body.wanted())


def _orders_to_all(api: APIRouter, gateway: Gateway) -> None:
    """Add the routes for several nodes, or the master."""

    @api.post("/v1/evict", summary="Let chunks go on every node", tags=["nodes"])
    async def evict_everywhere(request: Request, body: EvictBody) -> Row:
        """Evict on each node."""
        async with gateway.store(request.headers) as store:
            return await orders.evict(store, "", *body.wanted())

    @api.get("/v1/policy", summary="The nodes' eviction policy", tags=["nodes"])
    async def policy(request: Request, node: Annotated[str, Query(description="this node only")] = "") -> Row:
        """Node -> policy."""
        async with gateway.store(request.headers) as store:
            return await orders.policy(store, node, None)

    @api.put("/v1/policy", summary="Switch the eviction policy while the nodes run", tags=["nodes"])
    async def switch(request: Request, body: PolicyBody) -> Row:
        """Of all nodes, or one; chunks and their order are kept. Lasts until a node restarts."""
        async with gateway.store(request.headers) as store:
            return await orders.policy(store, body.node, body.name)

    @api.post("/v1/replicate", summary="Have keys copied ahead of demand", tags=["chunks"])
    async def replicate(request: Request, body: ReplicateBody) -> Row:
        """The master copies in the background; unread copies are dropped again."""
        async with gateway.store(request.headers) as store:
            return await orders.replicate(store, body.keys, body.holders, body.for_s)

    @api.post("/v1/check", summary="Verify all bytes, compare directory and nodes", tags=["store"])
    async def checked(
        request: Request,
        repair: Annotated[bool, Query(description="drop corrupt chunks, have the nodes report again")] = False,
    ) -> Row:
        """`findings` are all faults found, `left` the remaining ones after a repair. One check at a time."""
        with gateway.checks.holding():
            try:
                async with asyncio.timeout(gateway.config.request_s), gateway.store(request.headers) as store:
                    report = await check(store, with_repair=repair)
            except TimeoutError:
                raise DeadlineExceeded(f"the check was not finished after {gateway.config.request_s:g} s") from None
        return report.row()


def _questions(api: APIRouter, gateway: Gateway) -> None:
    """Add the routes that only read."""

    @api.get("/v1/nodes", summary="List the store nodes", tags=["nodes"])
    async def nodes(request: Request) -> list[Row]:
        """Their addresses, contents, last signs of life and drain progress."""
        async with gateway.store(request.headers) as store:
            found: list[Row] = plain(await store.nodes())
        return found

    @api.get("/v1/stat", summary="The store as a whole", tags=["store"])
    async def stat(request: Request) -> Row:
        """Nodes, chunks (each copy counted), bytes of memory and SSD."""
        async with gateway.store(request.headers) as store:
            return rows.totals(await store.nodes())

    @api.get("/v1/tenants", summary="What each tenant holds and may hold", tags=["store"])
    async def tenants(request: Request) -> list[Row]:
        """Show tenants; a tenant's own token shows that tenant only."""
        async with gateway.store(request.headers) as store:
            found: list[Row] = plain(await store.tenants())
        return found
