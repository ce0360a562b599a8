"""What the fast port bounds: connections that say nothing, those of gRPC, and what unknown peers may send."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import socket
import ssl
from pathlib import Path

import pytest

from tanghulu.auth import handshakes
from tanghulu.auth.credentials import TlsFiles
from tanghulu.auth.tls import ServerTls, client_context
from tanghulu.auth.tokens import TokensFile
from tanghulu.errors import InvalidRequest, NodeUnavailable, Overloaded, Unauthorized
from tanghulu.protos import router_pb2
from tanghulu.rpc import fast_port, fast_server
from tanghulu.rpc.authorizer import Authorizer
from tanghulu.rpc.fast_aio import AsyncFastConnection
from tanghulu.rpc.fast_client import FastConnection
from tanghulu.rpc.frames import HEAD, PREAMBLE, encode_head
from tanghulu.rpc.greeting import welcome
from tanghulu.rpc.methods import HELLO, PROTOCOL_VERSION, HelloRequest
from tanghulu.rpc.wire import encode, parser_of
from tests.rpc.service import ECHO, Answer, Ask, Served, head_of, serving, until
from tests.tls_files import Authority

QUESTION = router_pb2.RouterQuestion()
ASK, REPLY = Ask(keys=["k"]), Answer


async def test_those_who_say_nothing_make_way(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many open a connection and wait, whoever says what he wants gets in."""
    monkeypatch.setattr(fast_port, "MAX_UNDECIDED", 3)
    address = served.fast_port.address
    silent = [await asyncio.open_connection(address.host, address.port) for _ in range(8)]
    connection = await AsyncFastConnection.connect(address)
    assert (await connection.call(ECHO, ASK, REPLY)).message.node_ids == ["k"]
    for reader, _ in silent[:5]:
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(1), 30) == b""
    await connection.close()
    for _, writer in silent:
        writer.close()


async def test_those_who_begin_a_handshake_and_do_not_end_it_make_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshakes, "MAX_HANDSHAKES", 3)
    authority = Authority(tmp_path)
    cert, key = authority.sign("host")
    async with serving(ServerTls(TlsFiles(cert=cert, key=key), mutual=False)) as served:
        address = served.fast_port.address
        silent = []
        for number in range(8):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(b"\x16\x03\x01"[: number % 4])  # the beginning of a ClientHello
            silent.append((reader, writer))
        for reader, _ in silent[:5]:
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(1), 30) == b""
        assert not any(reader.at_eof() for reader, _ in silent[5:])
        connection = await AsyncFastConnection.connect(address, tls=TlsFiles(ca=authority.ca))
        silent += [await asyncio.open_connection(address.host, address.port) for _ in range(8)]
        for reader, _ in silent[5:13]:
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(1), 30) == b""
        assert (await connection.call(ECHO, ASK, REPLY)).message.node_ids == ["k"], "its handshake has ended"
        await connection.close()
    for _, writer in silent:
        writer.close()


async def test_a_connection_without_a_descriptor_for_its_handshake_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_descriptor(_: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    authority = Authority(tmp_path)
    cert, key = authority.sign("host")
    async with serving(ServerTls(TlsFiles(cert=cert, key=key), mutual=False)) as served:
        monkeypatch.setattr(os, "dup", no_descriptor)
        reader, writer = await asyncio.open_connection(served.fast_port.address.host, served.fast_port.address.port)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(1), 30) == b""
        writer.close()


async def test_what_comes_with_the_end_of_a_handshake_is_not_lost(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.sign("host")
    async with serving(ServerTls(TlsFiles(cert=cert, key=key), mutual=False)) as served:
        address = served.fast_port.address

        def ask() -> list[str]:
            incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            wire = client_context(TlsFiles(ca=authority.ca)).wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
            with socket.create_connection((address.host, address.port), timeout=30) as sock:
                while True:
                    try:
                        wire.do_handshake()
                        break
                    except ssl.SSLWantReadError:
                        sock.sendall(outgoing.read())
                        incoming.write(sock.recv(1 << 16))
                body = encode(ASK)
                wire.write(PREAMBLE + encode_head(ECHO, 3, len(body), 0) + body)
                sock.sendall(outgoing.read())  # the end of the handshake, and the first call behind it
                answer = b""
                while len(answer) < HEAD.size or len(answer) < HEAD.size + head_of(answer[: HEAD.size])[0]:
                    try:
                        answer += wire.read()
                    except ssl.SSLWantReadError:
                        incoming.write(sock.recv(1 << 16))
                return list(parser_of(REPLY)(answer[HEAD.size :]).node_ids)

        for _ in range(20):
            assert await asyncio.to_thread(ask) == ["k"]


@pytest.fixture
async def guarded(served: Served, tmp_path: Path) -> Served:
    """The same service behind a gate that knows one token."""
    file = tmp_path / "tokens.toml"
    file.touch(mode=0o600)
    sha256 = hashlib.sha256(b"secret").hexdigest()
    file.write_text(f'[[tokens]]\nname = "t"\nrights = ["read"]\nsha256 = "{sha256}"\n')

    served.service.register(HELLO, welcome)
    Authorizer(TokensFile(file)).authorize(served.service)
    return served


@pytest.mark.parametrize("num_sent", [0, fast_server.MAX_UNKNOWN_BYTES + 1])
async def test_an_unknown_peer_may_send_little(guarded: Served, num_sent: int) -> None:
    """It cannot have the process keep megabytes of a frame that it never finishes."""
    address = guarded.fast_port.address
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(PREAMBLE + HEAD.pack(0, 60 << 20, ECHO, 0, 1) + bytes(num_sent))
    answer = await asyncio.wait_for(reader.read(), 30)
    assert b"UNAUTHORIZED" in answer
    assert b"send HELLO first" in answer
    writer.close()


async def test_a_known_peer_may_send_as_much_as_ever(guarded: Served) -> None:
    connection = await asyncio.to_thread(FastConnection, guarded.fast_port.address)
    with pytest.raises(Unauthorized, match="HELLO"):
        await asyncio.to_thread(connection.call, ECHO, ASK, REPLY)
    request = HelloRequest(PROTOCOL_VERSION, token="secret")
    await asyncio.to_thread(connection.call, HELLO.number, request, HELLO.reply)
    with pytest.raises(InvalidRequest, match="comes once"):
        await asyncio.to_thread(connection.call, HELLO.number, request, HELLO.reply)
    value = bytes(1 << 20)
    assert (await asyncio.to_thread(connection.call, ECHO, ASK, REPLY, [value])).attachment == value
    connection.close()


def greet(connection: FastConnection) -> None:
    connection.call(HELLO.number, HelloRequest(PROTOCOL_VERSION, token="secret"), HELLO.reply)


async def test_the_unknown_make_way_for_each_other_and_not_for_the_known(
    guarded: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections that say that they speak the fast lane, and then nothing, take nobody's place."""
    monkeypatch.setattr(fast_server, "MAX_UNKNOWN_PEERS", 3)
    guarded.service.max_connections = 2
    address = guarded.fast_port.address
    first = await asyncio.to_thread(FastConnection, address)
    await asyncio.to_thread(greet, first)
    silent = [await asyncio.open_connection(address.host, address.port) for _ in range(8)]
    for _, writer in silent:
        writer.write(PREAMBLE)
    for reader, _ in silent[:5]:
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(1), 30) == b""
    second = await asyncio.to_thread(FastConnection, address)
    await asyncio.to_thread(greet, second)
    assert (await asyncio.to_thread(first.call, ECHO, ASK, REPLY)).message.node_ids == ["k"]
    third = await asyncio.to_thread(FastConnection, address)
    await asyncio.to_thread(greet, third)
    with pytest.raises((Overloaded, NodeUnavailable), match="has reached its limit"):
        await asyncio.to_thread(third.call, ECHO, ASK, REPLY)
    for connection in (first, second, third):
        connection.close()
    for _, writer in silent:
        writer.close()
    await until(lambda: not guarded.service.peers)
    assert not guarded.service.unknown


async def test_a_hello_is_not_waited_for_for_ever(guarded: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    address = guarded.fast_port.address
    known = await asyncio.to_thread(FastConnection, address)
    await asyncio.to_thread(greet, known)
    monkeypatch.setattr(fast_server, "HELLO_S", 0.05)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(PREAMBLE)
    assert b"no HELLO was received" in await asyncio.wait_for(reader.read(), 30)
    writer.close()
    assert (await asyncio.to_thread(known.call, ECHO, ASK, REPLY)).message.node_ids == ["k"]
    known.close()


async def test_a_large_frame_is_not_served_after_the_end(served: Served) -> None:
    served.service.max_connections = 0
    reader, writer = await asyncio.open_connection(served.fast_port.address.host, served.fast_port.address.port)
    body = encode(ASK)
    small, large = (encode_head(ECHO, 3, len(body), size) + body for size in (0, 1 << 20))
    writer.write(PREAMBLE + small + large)
    assert b"has reached its limit" in await asyncio.wait_for(reader.read(), 30)
    writer.write(bytes(1 << 20))
    await until(lambda: not served.service.peers)
    assert served.closed == 0, "a served echo notes the end of its connection"
    writer.close()
