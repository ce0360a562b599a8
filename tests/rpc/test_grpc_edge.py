"""The edge to gRPC: errors arrive whole whatever they quote, and channels look again where a name leads."""

from __future__ import annotations

import socket

import grpc
import grpc.aio
import pytest

from tanghulu.errors import DeadlineExceeded, MasterUnavailable, ModelNotFound
from tanghulu.rpc.grpc_edge import MOST_DETAILS_BYTES, abort, channel, shortened, typed_errors
from tanghulu.types import Address


@pytest.mark.parametrize("name", ["m" * 20_000, "é" * 30_000, "\n" * 9_000, "\ud800" * 9_000, "short"])
async def test_a_long_error_arrives_with_its_code_and_both_its_ends(name: str) -> None:
    async def refuse(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        await abort(context, ModelNotFound(f"model {name} is not served; there is tiny"), (("retry-after", "1"),))
        return b""

    server = grpc.aio.server()
    handlers = {"Refuse": grpc.unary_unary_rpc_method_handler(refuse)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Refusals", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    link = channel(Address("127.0.0.1", port))
    try:
        with pytest.raises(ModelNotFound) as caught:
            async with typed_errors("it"):
                await link.unary_unary("/test.Refusals/Refuse")(b"", timeout=20)
        assert caught.value.message.startswith("model ")
        assert caught.value.message.endswith("is not served; there is tiny")
        assert len(caught.value.message.encode()) <= MOST_DETAILS_BYTES
    finally:
        await link.close()
        await server.stop(None)


def test_a_message_that_is_short_enough_stays_as_it_is() -> None:
    assert shortened("ü" * 1024) == "ü" * 1024
    assert len(shortened("ü" * 1025).encode()) <= MOST_DETAILS_BYTES


async def test_a_dead_peer_is_unavailable_or_late() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = Address("127.0.0.1", free.getsockname()[1])
    async with channel(address) as link:
        call = link.unary_unary("/test.Nobody/Answers")
        with pytest.raises(MasterUnavailable):
            async with typed_errors("peer", MasterUnavailable):
                await call(b"", timeout=30)
        with pytest.raises(DeadlineExceeded):
            async with typed_errors("peer"):
                await call(b"", timeout=0.05, wait_for_ready=True)
