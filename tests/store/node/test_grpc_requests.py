"""The room that requests over gRPC have: decisions by themselves, and with a real gRPC server."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from tanghulu.protos import store_pb2, store_pb2_grpc
from tanghulu.rpc.grpc_edge import MESSAGE_BYTES, SERVER_OPTIONS, from_rpc_error
from tanghulu.store.node.rpc.grpc_requests import GrpcRequests, RequestRoom
from tests.rpc.service import until

PUT = "/tanghulu.v1.StoreNode/Put"


def test_a_message_that_is_coming_counts_as_the_largest() -> None:
    room = RequestRoom(most_bytes=20, message_bytes=10)
    assert room.enter("a")
    assert room.enter("b")
    assert not room.enter("c")
    assert not room.enter("d")
    assert room.came("a", 1) == []
    assert room.came("b", 9) == ["c"]
    assert room.leave("d") == []
    assert room.leave("a") == []
    assert room.leave("b") == []
    assert room.enter("e")
    room.check()


def test_calls_come_in_order_and_within_the_bound() -> None:
    rng = random.Random(1)
    room = RequestRoom(most_bytes=35, message_bytes=10)
    coming: list[int] = []
    waiting: list[int] = []
    there: list[int] = []
    for call in range(2000):
        (coming if room.enter(call) else waiting).append(call)
        for _ in range(rng.randrange(3)):
            if coming and rng.random() < 0.5:
                chosen = coming.pop(rng.randrange(len(coming)))
                there.append(chosen)
                served = room.came(chosen, rng.randrange(11))
            else:
                calls = rng.choice([coming, waiting, there])
                served = room.leave(calls.pop(rng.randrange(len(calls)))) if calls else []
            assert served == waiting[: len(served)]
            coming += served  # type: ignore[arg-type]
            del waiting[: len(served)]
            room.check()


class Node(store_pb2_grpc.StoreNodeServicer):
    async def Put(self, request: store_pb2.PutRequest, context: Any) -> store_pb2.PutReply:
        return store_pb2.PutReply(results=[store_pb2.PutResult(existed=True)] * len(request.items))


@asynccontextmanager
async def served(requests: GrpcRequests) -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[requests])
    store_pb2_grpc.add_StoreNodeServicer_to_server(Node(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as link:
            yield link
    finally:
        await server.stop(None)


def silent_put(link: grpc.aio.Channel) -> grpc.aio.StreamUnaryCall[Any, Any]:
    """A call whose request does not come."""
    return link.stream_unary(PUT)()


async def test_a_request_is_not_received_before_there_is_room() -> None:
    requests = GrpcRequests(most_bytes=MESSAGE_BYTES)
    async with served(requests) as link:
        silent = silent_put(link)
        await until(lambda: requests.num_held == 1)
        request = store_pb2.PutRequest(items=[store_pb2.PutItem()], inline_data=bytes(8 << 20))
        call = store_pb2_grpc.StoreNodeStub(link).Put(request)
        await until(lambda: requests.num_waiting == 1)
        assert not call.done()
        silent.cancel()
        assert (await call).results[0].existed
        await until(lambda: requests.num_held == 0)


async def test_requests_that_do_not_come_make_way() -> None:
    requests = GrpcRequests(most_bytes=MESSAGE_BYTES, request_s=0.3)
    async with served(requests) as link:
        calls = [silent_put(link) for _ in range(3)]
        codes = {await call.code() for call in calls}
        assert codes <= {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED}
        await until(lambda: requests.num_held == 0)
        ended = link.stream_unary(PUT)(iter([]))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await ended
        assert from_rpc_error(error.value, "node").code == "INVALID_REQUEST"
        reply = await store_pb2_grpc.StoreNodeStub(link).Put(store_pb2.PutRequest(items=[store_pb2.PutItem()]))
        assert reply.results[0].existed


async def test_many_calls_at_once_are_all_served() -> None:
    requests = GrpcRequests(most_bytes=MESSAGE_BYTES)
    async with served(requests) as link:
        request = store_pb2.PutRequest(items=[store_pb2.PutItem()], inline_data=bytes(1 << 20))
        replies = await asyncio.gather(*(store_pb2_grpc.StoreNodeStub(link).Put(request) for _ in range(40)))
        assert all(reply.results[0].existed for reply in replies)
        await until(lambda: requests.num_held == requests.num_waiting == 0)
