"""The same service over gRPC (protos/store.proto), for languages without a client of ours.

Values travel inside messages, so they are bounded by a message's size; longer ones use HTTP. Protobuf stays here.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

import grpc.aio

from tanghulu.auth.places import Caller
from tanghulu.errors import InvalidRequest, TanghuluError
from tanghulu.protos import store_pb2 as pb
from tanghulu.protos import store_pb2_grpc
from tanghulu.rpc import grpc_edge
from tanghulu.rpc.grpc_port import GrpcPort
from tanghulu.store.gateway.clients import KEYS_PER_PAGE, GatewayClient
from tanghulu.store.gateway.gateway import Gateway
from tanghulu.store.protocol.types import validate_key
from tanghulu.types import format_size

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
A = TypeVar("A")

#: The longest value in a message; gRPC's own bound for a message is larger.
MAX_MESSAGE_VALUE_BYTES: Final = 60 << 20
_DEFAULT_LIMIT: Final = 1000
_PINS: Final[dict[int, str]] = {pb.NONE: "none", pb.SOFT: "soft", pb.HARD: "hard"}
_PIN_NUMBERS: Final[dict[str, Any]] = {name: number for number, name in _PINS.items()}


class StoreServicer(store_pb2_grpc.StoreServicer):
    """The methods of ``Store`` on ``gateway``, within its bounds."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def Put(self, request: pb.PutRequest, context: Context) -> pb.PutReply:
        """Put a value."""

        async def put(store: GatewayClient) -> pb.PutReply:
            self._hold(len(request.value), context)
            status = await store.put(
                request.key,
                request.value,
                replicas=request.replicas or 1,
                pin=_pin(request.pin),
                ttl_s=request.ttl_s if request.HasField("ttl_s") else None,
                prefer_node=request.prefer_node or None,
            )
            self._gateway.metrics.written_bytes.inc(0 if status.existed else len(request.value))
            return pb.PutReply(existed=status.existed, num_replicas=status.num_replicas)

        return await self._answer("Put", put, context)

    async def Get(self, request: pb.GetRequest, context: Context) -> pb.GetReply:
        """Get a value, or a part of it."""

        async def get(store: GatewayClient) -> pb.GetReply:
            length = request.length if request.HasField("length") else None
            if length is None:
                validate_key(request.key)
                length = (await store.stat(request.key)).size_bytes - request.offset
            if length > MAX_MESSAGE_VALUE_BYTES:
                raise InvalidRequest(
                    f"{format_size(length)} of {request.key!r} exceed a gRPC message; get at most "
                    f"{format_size(MAX_MESSAGE_VALUE_BYTES)} with offset and length, or the whole value over HTTP"
                )
            self._hold(max(length, 0), context)
            with await store.get_range(request.key, request.offset, length) as chunk:
                self._gateway.metrics.read_bytes.inc(len(chunk))
                return pb.GetReply(value=bytes(chunk.view), version=chunk.version)

        return await self._answer("Get", get, context)

    async def Exists(self, request: pb.Keys, context: Context) -> pb.ExistsReply:
        """Return whether keys exist."""

        async def exists(store: GatewayClient) -> pb.ExistsReply:
            return pb.ExistsReply(found=await store.exists_many(_bounded(request.keys)))

        return await self._answer("Exists", exists, context)

    async def Remove(self, request: pb.Keys, context: Context) -> pb.RemoveReply:
        """Remove values."""

        async def remove(store: GatewayClient) -> pb.RemoveReply:
            removed = await store.remove_many(_bounded(request.keys), raise_errors=True)
            return pb.RemoveReply(removed=[each is True for each in removed])

        return await self._answer("Remove", remove, context)

    async def Stat(self, request: pb.StatRequest, context: Context) -> pb.Chunk:
        """Describe a chunk."""

        async def stat(store: GatewayClient) -> pb.Chunk:
            info = await store.stat(request.key)
            return pb.Chunk(
                key=info.key,
                size_bytes=info.size_bytes,
                version=info.version,
                nodes=info.nodes,
                pin=_PIN_NUMBERS[info.pin.value],
                ttl_s=info.ttl_s,
                replicas=info.replicas,
                age_s=info.age_s,
                num_hits=info.num_hits,
                num_leases=info.num_leases,
                tier=info.tier.value,
            )

        return await self._answer("Stat", stat, context)

    async def List(self, request: pb.ListRequest, context: Context) -> pb.ListReply:
        """List keys, a page at a time."""

        async def page(store: GatewayClient) -> pb.ListReply:
            if request.limit > KEYS_PER_PAGE:
                raise InvalidRequest(f"limit {request.limit} is above {KEYS_PER_PAGE}; list the keys in pages")
            keys, more = await store.key_page(request.prefix, request.after, request.limit or _DEFAULT_LIMIT)
            listed = [
                pb.ListedChunk(key=each.key, size_bytes=each.size_bytes, version=each.version, nodes=each.nodes)
                for each in keys
            ]
            return pb.ListReply(chunks=listed, next=keys[-1].key if more and keys else "")

        return await self._answer("List", page, context)

    async def _answer(self, name: str, work: Callable[[GatewayClient], Awaitable[A]], context: Context) -> A:
        """Do ``work`` on behalf of the caller; typed errors become gRPC's."""
        gateway, began_s, status = self._gateway, time.monotonic(), grpc.StatusCode.CANCELLED
        headers = _headers(context.invocation_metadata() or ())
        try:
            with gateway.place(headers):
                async with gateway.store(headers) as store:
                    answer = await work(store)
            status = grpc.StatusCode.OK
        except TanghuluError as error:
            status = grpc_edge.status_of(error)
            await grpc_edge.abort(context, error)
            raise
        finally:
            gateway.metrics.note_call(name, status.name, time.monotonic() - began_s)
        return answer

    def _hold(self, size_bytes: int, context: Context) -> None:
        """Count a value until its call has ended; raises Overloaded if too many are in progress."""
        held = ExitStack()
        held.enter_context(self._gateway.values.holding_bytes(size_bytes))
        context.add_done_callback(lambda _: held.close())


class _TokenAuthorizer:
    """Admits callers whom the store accepts."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def admit(self, method: str, metadata: Sequence[tuple[str, str | bytes]]) -> Caller:
        """Return the owner of a call's place. Raises Unauthorized, MasterUnavailable, Overloaded."""
        headers = _headers(metadata)
        async with self._gateway.store(headers):
            return self._gateway.caller_of(headers)


class StorePort(GrpcPort):
    """The port of ``StoreServicer`` on ``gateway``."""

    def __init__(self, gateway: Gateway) -> None:
        add = partial(store_pb2_grpc.add_StoreServicer_to_server, StoreServicer(gateway))
        most = gateway.config.max_requests
        super().__init__(gateway.config, add, authorizer=_TokenAuthorizer(gateway), max_calls=most)


def _headers(metadata: Sequence[tuple[str, str | bytes]]) -> dict[str, str]:
    return {name: value for name, value in metadata if isinstance(value, str)}


def _pin(number: int) -> str:
    name = _PINS.get(number)
    if name is None:
        raise InvalidRequest(f"pin {number} is unknown; use one of {', '.join(_PIN_NUMBERS)}")
    return name


def _bounded(keys: Sequence[str]) -> list[str]:
    if len(keys) > KEYS_PER_PAGE:
        raise InvalidRequest(f"{len(keys)} keys in one call; the limit is {KEYS_PER_PAGE}, so split them")
    return list(keys)
