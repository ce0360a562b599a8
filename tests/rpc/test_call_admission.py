"""The room that requests over gRPC have: decisions by themselves, and with a real gRPC server."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from tanghulu.auth.places import Caller, RequestRoom
from tanghulu.protos import inference_pb2, inference_pb2_grpc, store_pb2, store_pb2_grpc
from tanghulu.rpc.grpc_edge import MESSAGE_BYTES, SERVER_OPTIONS, CallAdmission, from_rpc_error, guarded_server
from tests.rpc.service import until

PUT = "/tanghulu.store.v1.Store/Put"


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


def test_a_tenant_has_half_of_the_room_and_callers_take_turns() -> None:
    room = RequestRoom(most_bytes=40, message_bytes=10)
    acme, other = (Caller(name, has_share=True, is_operator=False) for name in ("acme", "other"))
    assert [room.enter(f"a{number}", acme) for number in range(5)] == [True, True, False, False, False]
    assert [room.enter(f"o{number}", other) for number in range(3)] == [True, True, False]
    room.check()
    assert room.leave("o0") == ["o2"]
    assert room.came("a0", 10) == []
    assert room.came("a1", 0) == ["a2"]
    assert room.leave("o1") == []
    assert room.leave("a4") == []
    assert room.leave("a0") == ["a3"]
    room.check()


class Store(store_pb2_grpc.StoreServicer):
    async def Put(self, request: store_pb2.PutRequest, context: Any) -> store_pb2.PutReply:
        return store_pb2.PutReply(existed=True)


@asynccontextmanager
async def served(requests: CallAdmission) -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[requests])
    store_pb2_grpc.add_StoreServicer_to_server(Store(), server)
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
    requests = CallAdmission(100, most_bytes=MESSAGE_BYTES)
    async with served(requests) as link:
        silent = silent_put(link)
        await until(lambda: requests.num_held == 1)
        request = store_pb2.PutRequest(value=bytes(8 << 20))
        call = store_pb2_grpc.StoreStub(link).Put(request)
        await until(lambda: requests.num_waiting == 1)
        assert not call.done()
        silent.cancel()
        assert (await call).existed
        await until(lambda: requests.num_held == 0)


async def test_requests_that_do_not_come_make_way() -> None:
    requests = CallAdmission(100, most_bytes=MESSAGE_BYTES, request_s=0.3, wait_s=0.3)
    async with served(requests) as link:
        calls = [silent_put(link) for _ in range(3)]
        codes = {await call.code() for call in calls}
        assert codes <= {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED}
        await until(lambda: requests.num_held == 0)
        ended = link.stream_unary(PUT)(iter([]))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await ended
        assert from_rpc_error(error.value, "node").code == "INVALID_REQUEST"
        reply = await store_pb2_grpc.StoreStub(link).Put(store_pb2.PutRequest())
        assert reply.existed


async def test_many_calls_at_once_are_all_served() -> None:
    requests = CallAdmission(100, most_bytes=MESSAGE_BYTES)
    async with served(requests) as link:
        request = store_pb2.PutRequest(value=bytes(1 << 20))
        replies = await asyncio.gather(*(store_pb2_grpc.StoreStub(link).Put(request) for _ in range(40)))
        assert all(reply.existed for reply in replies)
        await until(lambda: requests.num_held == requests.num_waiting == 0)


class Tenants:
    """An authorizer that takes the name in a call's metadata."""

    async def admit(self, method: str, metadata: Sequence[tuple[str, str | bytes]]) -> Caller:
        name = str(dict(metadata)["name"])
        return Caller(name, has_share=name != "boss", is_operator=name == "boss")


class Streams(inference_pb2_grpc.InferenceServicer):
    async def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> AsyncIterator[Any]:
        yield inference_pb2.GenerateReply()
        await asyncio.Event().wait()

    async def Abort(self, request: inference_pb2.AbortRequest, context: Any) -> Any:
        return inference_pb2.AbortReply()


async def test_a_caller_has_a_share_of_calls_and_the_others_go_on() -> None:
    server = guarded_server(6, Tenants())  # type: ignore[arg-type]
    inference_pb2_grpc.add_InferenceServicer_to_server(Streams(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as link:
            stub = inference_pb2_grpc.InferenceStub(link)

            def generate(name: str) -> Any:
                return stub.Generate(inference_pb2.GenerateRequest(), metadata=(("name", name),))

            streams = [generate("acme") for _ in range(3)]
            for each in streams:
                await each.read()
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await generate("acme").read()
            error = from_rpc_error(refused.value, "conductor")
            assert (error.code, "acme has 3 calls" in error.message) == ("OVERLOADED", True)
            for name in ("other", "boss"):
                await generate(name).read()
            streams[0].cancel()
            for _ in range(100):
                with contextlib.suppress(grpc.aio.AioRpcError):
                    assert await generate("acme").read() is not grpc.aio.EOF
                    break
                await asyncio.sleep(0.05)
            else:
                raise AssertionError("the place of the ended stream did not come back")
    finally:
        await server.stop(None)
