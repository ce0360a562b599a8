"""One version of the protocol: every door that takes a HELLO, and every client, refuses another by both numbers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import tanghulu
import tanghulu.aio
from tanghulu.errors import TanghuluError, VersionMismatch
from tanghulu.rpc.fast_client import FastConnection
from tanghulu.rpc.frames import PREAMBLE, FrameReader, encode_head
from tanghulu.rpc.methods import HELLO, PROTOCOL_VERSION, HelloReply, require_version
from tanghulu.rpc.wire import encode
from tanghulu.store.protocol.messages import NodeHello
from tanghulu.types import Address
from tests.store.cluster import Cluster

OTHER = PROTOCOL_VERSION + 1


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(1) as cluster:
        cluster.complete()
        yield cluster


def test_both_numbers_are_named() -> None:
    require_version(PROTOCOL_VERSION, "node-1")
    with pytest.raises(
        VersionMismatch, match=f"node-1 speaks version {OTHER} .* this process version {PROTOCOL_VERSION}"
    ):
        require_version(OTHER, "node-1")


@pytest.mark.parametrize("door", ["master", "node"])
@pytest.mark.parametrize("version", [0, OTHER])
def test_a_caller_of_another_version_is_refused(cluster: Cluster, door: str, version: int) -> None:
    address = Address.parse(cluster.address if door == "master" else cluster.nodes[0].address)
    connection, request = FastConnection(address), NodeHello(version, client_id="x")
    with pytest.raises(VersionMismatch, match=f"version {version} .* version {PROTOCOL_VERSION}"):
        connection.call(HELLO.number, request, HELLO.reply)
    connection.close()


class OtherPeer(asyncio.Protocol):
    """A process of another version: whatever it is asked, it answers as to a HELLO."""

    def connection_made(self, transport: Any) -> None:
        self._transport, self._reader, self._received = transport, FrameReader(), b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        if len(self._received) < len(PREAMBLE):
            return
        begun, self._received = self._received[len(PREAMBLE) :], PREAMBLE
        for frame in self._reader.feed(begun):
            body = encode(HelloReply(OTHER))
            self._transport.write(encode_head(frame.method, frame.call_id, len(body), 0) + body)


@asynccontextmanager
async def other_peer() -> AsyncIterator[str]:
    server = await asyncio.get_running_loop().create_server(OtherPeer, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_both_clients_refuse_a_master_of_another_version() -> None:
    async with other_peer() as address:
        with pytest.raises(TanghuluError, match=f"speaks version {OTHER} .* version {PROTOCOL_VERSION}"):
            async with await tanghulu.aio.connect(address, transport="tcp", deadline_s=5.0) as client:
                await client.exists("k")

        def ask() -> None:
            with tanghulu.connect(address, transport="tcp", deadline_s=5.0) as client:
                client.exists("k")

        with pytest.raises(TanghuluError, match=f"speaks version {OTHER} .* version {PROTOCOL_VERSION}"):
            await asyncio.to_thread(ask)
