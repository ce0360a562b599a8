"""Routes for chunks without their bytes: listing, description, removal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from tanghulu.errors import InvalidRequest
from tanghulu.store.admin import orders
from tanghulu.store.admin.orders import RemovalOutcome
from tanghulu.store.admin.rows import plain
from tanghulu.store.gateway.clients import KEYS_PER_PAGE, GatewayClient
from tanghulu.store.gateway.gateway import Gateway, TimeLimit
from tanghulu.store.gateway.values_api import check_for_change
from tanghulu.web.routes import rest

Row = dict[str, Any]
#: A pattern that takes longer for a page of keys would probably never end.
_MATCH_S = 3.0


def router(gateway: Gateway) -> APIRouter:
    """Return the routes."""
    api = APIRouter(tags=["chunks"])

    @api.get("/v1/chunks", summary="List keys, a page at a time")
    async def listing(
        request: Request,
        prefix: Annotated[str, Query(description="only keys that begin so")] = "",
        limit: Annotated[int, Query(ge=1, le=KEYS_PER_PAGE, description="at most this many")] = 1000,
        after: Annotated[str, Query(description="go on behind this key: `next` of the page before")] = "",
    ) -> Row:
        """Keys in order, with their sizes and holders. `next` is null on the last page."""
        async with gateway.store(request.headers) as store:
            keys, more = await store.key_page(prefix, after, limit)
        return {"chunks": plain(keys), "next": keys[-1].key if more and keys else None}

    @api.get("/v1/chunks/" + rest("key"), summary="All about one chunk")
    async def stat(request: Request, key: str) -> Row:
        """Size, version, holders, pin, remaining lifetime, reads, leases, checksums."""
        async with gateway.store(request.headers) as store:
            row: Row = plain(await store.stat(key))
        return row

    @api.delete("/v1/chunks", summary="Remove chunks by prefix or pattern")
    async def remove_several(
        request: Request,
        prefix: Annotated[str | None, Query(description="every key that begins so; not empty")] = None,
        regex: Annotated[str | None, Query(description="every key that this is found in; `^` removes all")] = None,
    ) -> Row:
        """Give one of the two. When the time is up (504) removed chunks stay removed: repeat to continue."""
        if bool(prefix) == bool(regex):
            raise InvalidRequest("give either prefix= or regex=, not empty; regex=^ removes everything")
        with gateway.removals.holding():
            async with gateway.store(request.headers) as store:
                return await _remove_several(store, prefix or "", regex, gateway.time_limit())

    @api.delete("/v1/chunks/" + rest("key"), summary="Remove a chunk")
    async def remove(request: Request, key: str) -> Row:
        """404 if there is none."""
        async with gateway.store(request.headers) as store:
            await check_for_change(request, store, key)
            removal = await orders.remove(store, [key])
        removal.raise_failure()
        return removal.row()

    return api


async def _remove_several(store: GatewayClient, prefix: str, regex: str | None, time_limit: TimeLimit) -> Row:
    total, after, more = RemovalOutcome(0), "", True
    while more:
        page, more = await store.key_page(prefix, after)
        keys: Sequence[str] = [info.key for info in page]
        after = keys[-1] if keys else after
        more = more and bool(keys)
        if regex is not None:
            keys = await matching(regex, keys, _MATCH_S)
        if keys:
            total = total.plus(await orders.remove(store, keys))
        if more:
            time_limit.left_s()
    if total.failure is not None:
        raise total.failure
    return RemovalOutcome(total.num_removed).row()  # it does not matter which request removed a listed key first


MAX_PATTERN = 4096
_TRY = """
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[1]), int(sys.argv[1])))
pattern, keys = json.load(sys.stdin)
try:
    found = re.compile(pattern).search
    result = [index for index, key in enumerate(keys) if found(key)]
except (re.error, OverflowError, RecursionError, MemoryError) as error:
    result = str(error) or type(error).__name__
json.dump(result, sys.stdout)
"""


async def matching(pattern: str, keys: Sequence[str], within_s: float) -> list[str]:
    """Return those of ``keys`` that ``pattern`` matches anywhere.

    Raises InvalidRequest for an invalid regular expression, or one that takes longer than ``within_s``.
    """
    if len(pattern) > MAX_PATTERN:
        raise InvalidRequest(f"the pattern has {len(pattern)} characters; the limit is {MAX_PATTERN}")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", "-c", _TRY, str(int(within_s) + 2)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={},  # this process may have a token in its environment
    )
    try:
        async with asyncio.timeout(within_s):
            output, _ = await process.communicate(json.dumps([pattern, list(keys)]).encode())
    except TimeoutError:
        raise InvalidRequest(f"{pattern!r} takes longer than {within_s:g} s on {len(keys)} keys; simplify it") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    result = json.loads(output) if process.returncode == 0 else "it ended the process that tried it"
    if isinstance(result, str):
        raise InvalidRequest(f"{pattern!r} is not a regular expression: {result}")
    return [keys[index] for index in result]
