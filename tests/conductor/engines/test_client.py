"""The client of engine servers against servers played byte by byte."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from tanghulu.auth.credentials import NO_TLS, TlsFiles
from tanghulu.auth.tls import HTTP1, ServerTls
from tanghulu.conductor.engines import client as clients
from tanghulu.conductor.engines.client import EngineClient, EngineGone
from tanghulu.conductor.engines.servers import EngineServer
from tanghulu.errors import DeadlineExceeded, InvalidRequest, NodeUnavailable, Overloaded
from tanghulu.types import Address
from tests.tls_files import Authority

HEAD = b"HTTP/1.1 200 OK\r\n"
SIZED = HEAD + b"content-length: 2\r\n\r\nhi"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"


class Server:
    """Sends the next of ``answers`` for each request; counts connections, and keeps requests."""

    def __init__(self) -> None:
        self.answers: list[bytes] = []
        self.closes = False
        self.requests: list[tuple[int, bytes]] = []
        self.num_connections = 0
        self.begun, self.ended = asyncio.Event(), asyncio.Event()
        self.tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        number, self.num_connections = self.num_connections, self.num_connections + 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
                self.requests.append((number, head + await reader.readexactly(int(length or 0))))
                writer.write(self.answers.pop(0) if self.answers else b"")
                self.begun.set()
                if self.closes:
                    break
        writer.close()
        self.ended.set()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take seconds for a handshake."""
    monkeypatch.setattr(clients, "CONNECT_TIMEOUT_S", 60.0)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    yield server
    await asyncio.gather(*server.tasks)


@contextlib.asynccontextmanager
async def connected(
    server: Server, tls: ServerTls | None = None, files: TlsFiles = NO_TLS, name: str = "127.0.0.1"
) -> AsyncIterator[EngineClient]:
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=None if tls is None else tls.context)
    address = Address(*listening.sockets[0].getsockname())
    url = f"http{'s' if tls else ''}://{name}:{address.port}/base"
    client = EngineClient(EngineServer("vllm", url).at(address, "one"), files)
    try:
        yield client
    finally:
        await client.close()
        listening.close()
        await listening.wait_closed()


async def streamed(client: EngineClient) -> list[list[bytes]]:
    return [events async for events in client.events("/v1/x", {"a": 1}, {"x-request-id": "r"})]


async def test_a_question_has_a_connection_of_its_own_and_streams_share_theirs(server: Server) -> None:
    events = CHUNKED + b"b\r\ndata: one\n\n\r\n18\r\ndata: two\n\ndata: three\n\n\r\n0\r\n\r\n"
    server.answers = [SIZED, events, events, SIZED]
    async with connected(server, name="localhost") as client:
        assert await client.call("/health") == b"hi"
        for _ in range(2):
            assert [data for events in await streamed(client) for data in events] == [b"one", b"two", b"three"]
        assert await client.call("/v1/y", {"b": 2}) == b"hi"
    assert [number for number, _ in server.requests] == [0, 1, 1, 2]
    assert b"\r\nhost: localhost:" in server.requests[0][1].lower()
    first, second, _, last = (request.lower() for _, request in server.requests)
    assert first.startswith(b"get /base/health http/1.1\r\n")
    assert b"connection: close" in first
    assert second.endswith(b'{"a":1}')
    assert b"\r\nx-request-id: r\r\n" in second
    assert b"accept-encoding" not in second
    assert last.endswith(b'{"b":2}')


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 20",
        HEAD + b"content-length: 9\r\n\r\nshort",
        CHUNKED + b"5\r\nshor",
        b"220 mail.example ESMTP\r\n",
        CHUNKED + b"zz\r\n",
        HEAD + b"a: " + b"b" * 100_000,
    ],
)
async def test_broken_answers(server: Server, answer: bytes) -> None:
    server.answers, server.closes = [answer, answer, SIZED], True
    async with connected(server) as client:
        with pytest.raises(NodeUnavailable, match="broke off"):
            await client.call("/a", {})
        with pytest.raises(NodeUnavailable, match="broke off"):
            await streamed(client)
        assert await client.call("/a", {}) == b"hi"


@pytest.mark.parametrize(
    ("status", "error"),
    [("400 Bad Request", InvalidRequest), ("503 Busy", Overloaded), ("307 Elsewhere", NodeUnavailable)],
)
async def test_refusals(server: Server, status: str, error: type[Exception]) -> None:
    body = b'{"error": {"message": "too long"}}'
    head = f"HTTP/1.1 {status}\r\nlocation: http://192.0.2.1/\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    server.answers = [head + body] * 2
    async with connected(server) as client:
        with pytest.raises(error, match="too long"):
            await client.call("/a", {})
        with pytest.raises(error, match="too long"):
            await streamed(client)


async def test_answers_that_are_too_large_or_late(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "MAX_ANSWER_BYTES", 1)
    server.answers = [SIZED]
    async with connected(server) as client:
        with pytest.raises(NodeUnavailable, match="answered with more than"):
            await client.call("/a")
        with pytest.raises(DeadlineExceeded, match=r"within 0\.05 s"):
            await client.call("/a", deadline_s=0.05)


async def test_nobody_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = Address(*taken.getsockname())
        client = EngineClient(EngineServer("vllm", f"http://{address}").at(address, "one"), NO_TLS)
        with pytest.raises(EngineGone, match="refuses connections"):
            await client.call("/health")
        await client.close()


async def test_a_connection_out_of_time_is_not_the_end_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    address = Address("127.0.0.1", 1)
    client = EngineClient(EngineServer("vllm", f"http://{address}").at(address, "one"), NO_TLS)

    def late(*_: object, **__: object) -> None:
        raise aiohttp.ConnectionTimeoutError("Connection timeout")

    monkeypatch.setattr(client._calls, "request", late)
    with pytest.raises(NodeUnavailable, match="Connection timeout") as caught:
        await client.call("/health")
    assert not isinstance(caught.value, EngineGone)
    await client.close()


@pytest.mark.parametrize("how", ["leaves", "closes"])
async def test_an_abandoned_stream_closes_its_connection(server: Server, how: str) -> None:
    """Which is how an engine learns that nobody waits for the rest."""
    server.answers = [CHUNKED + b"b\r\ndata: one\n\n\r\n"]
    async with connected(server) as client:
        events = client.events("/v1/x", {}, {})
        assert await anext(events) == [b"one"]
        if how == "leaves":
            await events.aclose()
        else:
            await client.close()
        async with asyncio.timeout(30):
            await server.ended.wait()
        if how == "closes":
            with pytest.raises(NodeUnavailable):
                await anext(events)


@pytest.mark.parametrize(
    ("names", "trusted", "works"), [("DNS:there", True, True), ("DNS:other", True, False), ("DNS:there", False, False)]
)
async def test_the_certificate_has_the_name_of_the_url(
    server: Server, tmp_path: Path, names: str, trusted: bool, works: bool
) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.sign("host", f"subjectAltName={names}")
    tls = ServerTls(TlsFiles(cert=cert, key=key), mutual=False, protocol=HTTP1)
    server.answers = [SIZED]
    async with connected(server, tls, TlsFiles(ca=authority.ca) if trusted else NO_TLS, "there") as client:
        if works:
            assert await client.call("/health") == b"hi"
        else:
            with pytest.raises(EngineGone, match="certificate"):
                await client.call("/health")
