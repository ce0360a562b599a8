"""A refused request over gRPC goes at once, not with the next collection of garbage."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import grpc.aio
import pytest

from tanghulu.errors import InvalidRequest
from tanghulu.rpc.grpc_edge import abort
from tests.rpc.service import until


class _Held:
    """Stands for a message: protobuf's own cannot be referred to weakly."""


async def test_a_refused_request_is_not_kept() -> None:
    held: list[weakref.ref[_Held]] = []

    async def refuse(request: bytes, context: Any) -> bytes:
        message = _Held()
        held.append(weakref.ref(message))
        try:
            raise InvalidRequest("no")
        except InvalidRequest as error:
            await abort(context, error)
            raise

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(refuse)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", {"Refuse": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    gc.disable()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for _ in range(3):
                with pytest.raises(grpc.aio.AioRpcError, match="no"):
                    await channel.unary_unary("/test.Test/Refuse")(b"")
        await until(lambda: not any(each() for each in held))
        assert len(held) == 3
    finally:
        gc.enable()
        await server.stop(0)
