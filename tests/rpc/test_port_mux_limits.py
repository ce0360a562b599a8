"""What the port mux bounds: connections that say nothing, those of gRPC, and what unknown peers may send."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from pathlib import Path

import grpc
import pytest

from tanghulu.auth.tokens import TokensFile
from tanghulu.errors import InvalidRequest, Unauthorized
from tanghulu.protos import directory_pb2 as pb
from tanghulu.protos import directory_pb2_grpc, store_pb2
from tanghulu.rpc import fast_server, port_mux
from tanghulu.rpc.authorizer import Authorizer
from tanghulu.rpc.fast_aio import AsyncFastConnection
from tanghulu.rpc.fast_client import FastConnection
from tanghulu.rpc.frames import HEAD, PREAMBLE
from tanghulu.rpc.grpc_edge import channel
from tanghulu.rpc.methods import HELLO
from tests.rpc.service import ECHO, Served

ASK, REPLY = pb.LocateRequest(keys=["k"]), pb.LocateReply


async def test_those_who_say_nothing_make_way(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many open a connection and wait, whoever says what he wants gets in."""
    monkeypatch.setattr(port_mux, "MAX_UNDECIDED", 3)
    address = served.port_mux.address
    silent = [await asyncio.open_connection(address.host, address.port) for _ in range(8)]
    connection = await AsyncFastConnection.connect(address)
    assert (await connection.call(ECHO, ASK, REPLY)).message.node_ids == ["k"]
    for reader, _ in silent[:5]:
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(1), 30) == b""
    await connection.close()
    for _, writer in silent:
        writer.close()


async def test_grpc_connections_are_bounded(served: Served) -> None:
    served.service.max_connections = 1
    async with channel(served.port_mux.address) as first:
        await directory_pb2_grpc.DirectoryStub(first).Locate(ASK, timeout=30)
        async with channel(served.port_mux.address) as second:
            with pytest.raises(grpc.aio.AioRpcError):
                await directory_pb2_grpc.DirectoryStub(second).Locate(ASK, timeout=0.5)
        await directory_pb2_grpc.DirectoryStub(first).Locate(ASK, timeout=30)
    async with channel(served.port_mux.address) as third:
        await directory_pb2_grpc.DirectoryStub(third).Locate(ASK, timeout=30, wait_for_ready=True)


@pytest.fixture
async def guarded(served: Served, tmp_path: Path) -> Served:
    """The same service behind a gate that knows one token."""
    file = tmp_path / "tokens.toml"
    file.touch(mode=0o600)
    sha256 = hashlib.sha256(b"secret").hexdigest()
    file.write_text(f'[[tokens]]\nname = "t"\nrights = ["read"]\nsha256 = "{sha256}"\n')

    def hello(peer: fast_server.Peer, request: store_pb2.HelloRequest, attachment: memoryview) -> store_pb2.HelloReply:
        return store_pb2.HelloReply()

    served.service.register(HELLO, hello)
    Authorizer(TokensFile(file)).authorize(served.service)
    return served


async def test_an_unknown_peer_may_send_little(guarded: Served) -> None:
    """It cannot have the process keep megabytes of a frame that it never finishes."""
    address = guarded.port_mux.address
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(PREAMBLE + HEAD.pack(0, 60 << 20, ECHO, 0, 1) + bytes(fast_server.MAX_UNKNOWN_BYTES + 1))
    answer = await asyncio.wait_for(reader.read(), 30)
    assert b"UNAUTHORIZED" in answer
    writer.close()


async def test_a_known_peer_may_send_as_much_as_ever(guarded: Served) -> None:
    connection = await asyncio.to_thread(FastConnection, guarded.port_mux.address)
    with pytest.raises(Unauthorized, match="HELLO"):
        await asyncio.to_thread(connection.call, ECHO, ASK, REPLY)
    request = store_pb2.HelloRequest(token="secret")
    await asyncio.to_thread(connection.call, HELLO.number, request, HELLO.reply)
    with pytest.raises(InvalidRequest, match="comes once"):
        await asyncio.to_thread(connection.call, HELLO.number, request, HELLO.reply)
    value = bytes(1 << 20)
    assert (await asyncio.to_thread(connection.call, ECHO, ASK, REPLY, [value])).attachment == value
    connection.close()
