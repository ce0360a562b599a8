"""The port mux: the fast lane and gRPC on one port, what it refuses, and its private socket."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from tanghulu.errors import (
    ChunkNotFound,
    ConfigError,
    DeadlineExceeded,
    MasterUnavailable,
    NodeUnavailable,
    TanghuluError,
)
from tanghulu.protos import router_pb2, router_pb2_grpc
from tanghulu.rpc.fast_server import FastService
from tanghulu.rpc.frames import ERROR, HEAD, PREAMBLE, encode_head
from tanghulu.rpc.grpc_edge import channel, typed_errors
from tanghulu.rpc.port_mux import PortMux
from tanghulu.rpc.wire import Failure, encode, error_of, parser_of, raise_for, status_of
from tanghulu.types import Address
from tests.rpc.service import ECHO, Answer, Ask, Served, head_of

REPLY = Answer


def ask(*keys: str) -> Ask:
    return Ask(keys)


async def test_garbage_is_shown_the_port_mux(served: Served) -> None:
    for first in (b"GET / HTTP/1.1\r\n\r\n", bytes(range(64))):
        reader, writer = await asyncio.open_connection(str(served.port_mux.address.host), served.port_mux.address.port)
        writer.write(first)
        assert await reader.read() == b""
        writer.close()
    reader, writer = await asyncio.open_connection(str(served.port_mux.address.host), served.port_mux.address.port)
    writer.write(PREAMBLE + b"\xff" * 16)
    body, _, method, call_id = head_of(await reader.readexactly(HEAD.size))
    assert (method, call_id) == (ERROR, 0)
    assert b"INVALID_REQUEST" in await reader.readexactly(body)
    assert await reader.read() == b""
    writer.close()


async def test_the_preamble_may_come_in_pieces(served: Served) -> None:
    reader, writer = await asyncio.open_connection(str(served.port_mux.address.host), served.port_mux.address.port)
    message = encode(ask("k"))
    for byte in PREAMBLE + encode_head(ECHO, 3, len(message), 0) + message:
        writer.write(bytes([byte]))
        await writer.drain()
    body, _, method, call_id = head_of(await reader.readexactly(HEAD.size))
    assert (method, call_id) == (ECHO, 3)
    assert parser_of(Answer)(await reader.readexactly(body)).node_ids == ["k"]
    writer.close()


async def test_grpc_on_the_same_port(served: Served) -> None:
    async with channel(served.port_mux.address) as connection:
        stub = router_pb2_grpc.RouterStub(connection)
        for name in ("a", "big" * 1_000_000):
            assert (await stub.BestWorker(router_pb2.RouterQuestion(request_id=name))).prefill_worker == name
        got = [int(piece.worker) async for piece in stub.DumpEvents(router_pb2.RouterDumpRequest())]
        assert got == list(range(200))


async def test_typed_errors_over_grpc(served: Served) -> None:
    async with channel(served.port_mux.address) as connection:
        stub = router_pb2_grpc.RouterStub(connection)
        with pytest.raises(ChunkNotFound, match="no missing: ключ\nнет"):
            async with typed_errors("peer"):
                await stub.BestWorker(router_pb2.RouterQuestion(request_id="missing"))
        with pytest.raises(NodeUnavailable, match="unimplemented"):
            async with typed_errors("peer"):
                await stub.Overlaps(router_pb2.RouterQuestion())


async def test_a_dead_grpc_peer_is_unavailable_or_late() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = Address("127.0.0.1", free.getsockname()[1])
    async with channel(address) as connection:
        stub = router_pb2_grpc.RouterStub(connection)
        with pytest.raises(MasterUnavailable):
            async with typed_errors("peer", MasterUnavailable):
                await stub.Overlaps(router_pb2.RouterQuestion(), timeout=30)
        with pytest.raises(DeadlineExceeded):
            async with typed_errors("peer"):
                await stub.Overlaps(router_pb2.RouterQuestion(), timeout=0.05, wait_for_ready=True)


async def test_a_taken_port_refuses_to_start(served: Served, tmp_path) -> None:
    other = PortMux(FastService(), tmp_path, "other")
    with pytest.raises(ConfigError, match="choose another --port"):
        await other.start("127.0.0.1", served.port_mux.address.port)
    await other.close(0.0)


async def test_a_run_directory_that_is_too_long_refuses_to_start(tmp_path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    port_mux = PortMux(FastService(), deep, "x")
    with pytest.raises(ConfigError, match="shorter --run-dir"):
        await port_mux.start("127.0.0.1", 0)
    await port_mux.close(0.0)


async def test_the_socket_is_private(served: Served) -> None:
    assert os.stat(served.port_mux.unix_path).st_mode & 0o777 == 0o600


def test_a_failure_carries_every_error() -> None:
    error = parser_of(Failure)(encode(Failure.of(ChunkNotFound("gone")))).error
    assert isinstance(error, ChunkNotFound)
    assert error.message == "gone"
    with pytest.raises(ChunkNotFound):
        raise_for(status_of(error))
    assert error_of(type(status_of(error))()) is None
    assert type(error_of(status_of(TanghuluError("x")))) is TanghuluError
