"""Routes for values: reading their bytes, in whole or in part, and storing them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tanghulu.errors import ChunkNotFound, InvalidRequest, NodeUnavailable
from tanghulu.store.admin import rows
from tanghulu.store.client.chunk import Chunk
from tanghulu.store.client.model import put_options
from tanghulu.store.gateway.bounds import read_into
from tanghulu.store.gateway.clients import GatewayClient
from tanghulu.store.gateway.gateway import Gateway
from tanghulu.store.protocol.types import validate_key
from tanghulu.types import format_size
from tanghulu.web.errors import BodyTooLarge, LengthRequired, PreconditionFailed, answer_to
from tanghulu.web.routes import rest

_OCTETS = "application/octet-stream"
_PIECE_BYTES = 256 << 10
_BYTES_OUT: dict[int | str, dict[str, Any]] = {
    200: {"content": {_OCTETS: {}}, "description": "the value"},
    206: {"content": {_OCTETS: {}}, "description": "the part of it that Range asks for"},
    304: {"description": "If-None-Match names what is there"},
    404: {"description": "no such chunk"},
    416: {"description": "Range asks for nothing of the value"},
}
_BODY_IN = {"requestBody": {"required": True, "content": {_OCTETS: {"schema": {"type": "string", "format": "binary"}}}}}


def router(gateway: Gateway) -> APIRouter:
    """Return the routes."""
    api = APIRouter(tags=["values"])

    @api.get("/v1/values/" + rest("key"), summary="The bytes of a value", responses=_BYTES_OUT, response_class=Response)
    async def get(request: Request, key: str) -> Response:
        """Honours `Range` (one range of bytes), `If-None-Match` and `If-Range`; ETag is the chunk's version."""
        validate_key(key)
        return _ValueReply(gateway, request, key)

    @api.head("/v1/values/" + rest("key"), summary="Whether a value is there, and its size", response_class=Response)
    async def head(request: Request, key: str) -> Response:
        """The headers of GET. Reads nothing, so it does not count as a use of the chunk."""
        async with gateway.store(request.headers) as store:
            info = await store.stat(key)
        if check_conditions(*conditions_of(request), tag_of(info.version)):
            return Response(status_code=304, headers=_headers(info.version))
        headers = {**_headers(info.version), "content-length": str(info.size_bytes)}
        return Response(status_code=200, headers=headers, media_type=_OCTETS)

    @api.put(
        "/v1/values/" + rest("key"),
        summary="Put a value",
        status_code=201,
        openapi_extra=_BODY_IN,
        responses={
            200: {"description": "the key was there already; nothing was written"},
            411: {"description": "Content-Length is missing"},
            412: {"description": "If-Match or If-None-Match does not hold"},
            413: {"description": "the value is longer than the store takes"},
        },
    )
    async def put(
        request: Request,
        key: str,
        replicas: Annotated[int, Query(description="number of nodes to hold it")] = 1,
        pin: Annotated[str, Query(description="how it stands to eviction: none, soft or hard")] = "none",
        ttl_s: Annotated[float | None, Query(description="seconds after which it may be evicted")] = None,
        prefer_node: Annotated[str | None, Query(description="id of the node that should hold it")] = None,
    ) -> Response:
        """The body is the value. Chunks are immutable: an existing key keeps its first value.

        With `If-None-Match: *` that is 412; `If-Match` requires an existing key.
        """
        validate_key(key)
        if "content-range" in request.headers:
            raise InvalidRequest("Content-Range is not supported; put the whole value")
        put_options(replicas, pin, ttl_s, prefer_node, True, 0)  # before the body is read
        size_bytes = _length(request)
        async with gateway.store(request.headers) as store:
            await _refuse_too_large(gateway, store, size_bytes)
            await check_for_change(request, store, key)
            with gateway.values.holding_what_comes() as come:
                body = np.empty(size_bytes, np.uint8).data  # memory without cost until it is written
                await read_into(request.receive, body, come)
                status = await store.put(key, body, replicas=replicas, pin=pin, ttl_s=ttl_s, prefer_node=prefer_node)
        if status.existed and (request.headers.get("if-none-match") or "").strip() == "*":
            raise PreconditionFailed(f"If-None-Match is *, but {key!r} was put meanwhile")
        gateway.metrics.written_bytes.inc(0 if status.existed else size_bytes)
        return JSONResponse(rows.put(status), 200 if status.existed else 201)

    return api


async def check_for_change(request: Request, store: GatewayClient, key: str) -> None:
    """Raise PreconditionFailed if the conditions of a request that changes ``key`` do not hold."""
    if_match, if_none_match = conditions_of(request)
    if if_match is None and if_none_match is None:
        return
    try:
        tag = tag_of((await store.stat(key)).version)
    except ChunkNotFound:
        tag = None
    if check_conditions(if_match, if_none_match, tag):
        raise PreconditionFailed(f"If-None-Match is {if_none_match}, but {key!r} exists with the ETag {tag}")


def conditions_of(request: Request) -> tuple[str | None, str | None]:
    """Return If-Match and If-None-Match, each as one list; None if absent."""
    found = (request.headers.getlist(name) for name in ("if-match", "if-none-match"))
    if_match, if_none_match = (",".join(lines) if lines else None for lines in found)
    return if_match, if_none_match


def _length(request: Request) -> int:
    length = request.headers.get("content-length")
    if length is None:
        raise LengthRequired("Content-Length is missing; chunked bodies are not supported")
    if not int(length):
        raise InvalidRequest("the value is empty; a chunk has at least one byte")
    return int(length)


async def _refuse_too_large(gateway: Gateway, store: GatewayClient, size_bytes: int) -> None:
    """Raise BodyTooLarge for a value that no node can ever hold, before it is sent."""
    views = await store.nodes()
    largest = max((view.capacity_bytes for view in views), default=size_bytes)
    most = min(largest, gateway.config.max_value, gateway.config.max_in_flight_bytes)
    if size_bytes > most:
        raise BodyTooLarge(f"the value has {format_size(size_bytes)}; the limit here is {format_size(most)}")


def _headers(version: int) -> dict[str, str]:
    return {"etag": tag_of(version), "accept-ranges": "bytes", "cache-control": "no-cache"}


class _ValueReply(Response):
    """A value, sent piece by piece from the store's own memory if mapped; its lease ends with the last piece."""

    def __init__(self, gateway: Gateway, request: Request, key: str) -> None:
        super().__init__()
        self._gateway = gateway
        self._request = request
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Get the value and send it."""
        async with self._gateway.store(self._request.headers) as store:
            if (version := await self._known(store)) is not None:
                await _begin(send, 304, _headers(version))
                await send({"type": "http.response.body"})
                return
            chunk, part, size_bytes = await self._read(store)
            with chunk, self._gateway.values.holding_bytes(len(chunk)):
                check_conditions(conditions_of(self._request)[0], None, tag_of(chunk.version))
                await self._send(send, chunk, part, size_bytes)

    async def _known(self, store: GatewayClient) -> int | None:
        """Return the chunk's version if the client has it already; then nothing is read."""
        conditions = conditions_of(self._request)
        if conditions == (None, None):
            return None
        version = (await store.stat(self._key)).version
        return version if check_conditions(*conditions, tag_of(version)) else None

    async def _read(self, store: GatewayClient) -> tuple[Chunk, ByteRange | None, int]:
        """Return (the bytes to send, their part of the value, the value's size)."""
        wanted = self._request.headers.get("range")
        if wanted is None or not is_single_range(wanted):
            chunk = await store.get(self._key)
            return chunk, None, len(chunk)
        info = await store.stat(self._key)
        if self._request.headers.get("if-range", tag_of(info.version)) != tag_of(info.version):
            chunk = await store.get(self._key)
            return chunk, None, len(chunk)
        part = part_of(wanted, info.size_bytes)
        chunk = await store.get_range(self._key, part.offset, part.length)
        if chunk.version != info.version:
            chunk.close()
            raise NodeUnavailable(f"{self._key!r} was replaced while it was being read; try again")
        return chunk, part, info.size_bytes

    async def _send(self, send: Send, chunk: Chunk, part: ByteRange | None, size_bytes: int) -> None:
        headers = {**_headers(chunk.version), "content-type": _OCTETS}
        headers["content-length"] = str(len(chunk))
        if part is not None:
            headers["content-range"] = part.content_range(size_bytes)
        await _begin(send, 200 if part is None else 206, headers)
        view = chunk.view
        for begin in range(0, len(chunk), _PIECE_BYTES):
            piece = bytes(view[begin : begin + _PIECE_BYTES])
            await send({"type": "http.response.body", "body": piece, "more_body": begin + len(piece) < len(chunk)})
        self._gateway.metrics.read_bytes.inc(len(chunk))


def tag_of(version: int) -> str:
    """Return the ETag of a chunk's version."""
    return f'"{version:x}"'


async def _begin(send: Send, status: int, headers: dict[str, str]) -> None:
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})


def unsatisfiable(error: RangeNotSatisfiable) -> Response:
    """Return the answer to a range outside the value."""
    answer = answer_to(error)
    answer.headers["content-range"] = f"bytes */{error.size_bytes}"
    return answer


_ONE = re.compile(r"bytes\s*=\s*(\d{0,19})\s*-\s*(\d{0,19})\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ByteRange:
    """``length`` bytes of a value from ``offset`` on."""

    offset: int
    length: int

    def content_range(self, size_bytes: int) -> str:
        """Return the Content-Range header of an answer with this part of a value of ``size_bytes``."""
        return f"bytes {self.offset}-{self.offset + self.length - 1}/{size_bytes}"


class RangeNotSatisfiable(InvalidRequest):
    """The value has no byte of the requested range."""

    code = "RANGE_NOT_SATISFIABLE"

    def __init__(self, message: str, size_bytes: int) -> None:
        super().__init__(message)
        self.size_bytes = size_bytes


def is_single_range(header: str | None) -> bool:
    """Return whether ``header`` is one well-formed range; several at once, and other units, get the whole value."""
    found = _ONE.fullmatch(header or "")
    if found is None or found.groups() == ("", ""):
        return False
    first, last = found.groups()
    return not (first and last) or int(first) <= int(last)


def names_tag(header: str, tag: str | None, *, weakly: bool) -> bool:
    """Return whether a condition's ``header`` lists the entity tag, or any by ``*``; None is no entity.

    If-None-Match compares ``weakly``, If-Match does not.
    """
    listed = [each.strip() for each in header.split(",")]
    if weakly:
        listed = [each.removeprefix("W/") for each in listed]
    return tag is not None and (tag in listed or listed == ["*"])


def check_conditions(if_match: str | None, if_none_match: str | None, tag: str | None) -> bool:
    """Return whether If-None-Match names the current chunk, so that a reader has it already.

    Raises PreconditionFailed if If-Match does not name it.
    """
    if if_match is not None and not names_tag(if_match, tag, weakly=False):
        raise PreconditionFailed(f"If-Match is {if_match[:80]}, but {f'the ETag is {tag}' if tag else 'no such key'}")
    return if_none_match is not None and names_tag(if_none_match, tag, weakly=True)


def part_of(header: str, size_bytes: int) -> ByteRange:
    """Return the range of ``header``, for which ``is_single_range`` is true, in a value of ``size_bytes``.

    Example of 10 bytes: ``bytes=2-4`` is (2, 3), ``bytes=8-`` (8, 2), ``bytes=-3`` (7, 3), ``bytes=5-99`` (5, 5).
    Raises RangeNotSatisfiable for ``bytes=10-`` and ``bytes=-0``.
    """
    found = _ONE.fullmatch(header)
    assert found is not None
    first, last = found.groups()
    if first:
        begin, end = int(first), min(int(last) + 1, size_bytes) if last else size_bytes
    else:
        begin, end = max(size_bytes - int(last), 0), size_bytes
    if begin >= end:
        raise RangeNotSatisfiable(f"{header}: the value has {size_bytes} bytes", size_bytes)
    return ByteRange(begin, end - begin)
