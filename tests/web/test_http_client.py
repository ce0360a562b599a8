"""The HTTP client of streams against servers played byte by byte."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tanghulu.auth.credentials import TlsFiles
from tanghulu.auth.tls import HTTP1, ServerTls, client_context
from tanghulu.rpc.sockets import dead_peer_options
from tanghulu.types import Address
from tanghulu.web import http_client
from tanghulu.web.http_client import ConnectFailed, HttpAnswer, HttpClient
from tests.tls_files import Authority

HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"


class Server:
    """Sends the next of ``answers`` for each request; the connections it has seen, and their requests."""

    def __init__(self, *answers: bytes, closes: bool = False) -> None:
        self.answers, self.closes = list(answers), closes
        self.heads: list[tuple[int, bytes]] = []
        self.num_connections = 0
        self.begun, self.ended = asyncio.Event(), asyncio.Event()
        self.tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.tasks.add(asyncio.current_task())
        number, self.num_connections = self.num_connections, self.num_connections + 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                self.heads.append((number, head + await reader.readexactly(length)))
                writer.write(self.answers.pop(0))
                self.begun.set()
                if self.closes:
                    break
        writer.close()
        self.ended.set()


@pytest.fixture
async def serve() -> AsyncIterator[Callable]:
    made: list[tuple[Server, asyncio.Server, HttpClient]] = []

    async def make(
        *answers: bytes,
        closes: bool = False,
        tls: ssl.SSLContext | None = None,
        trusted: ssl.SSLContext | None = None,
    ) -> tuple[Server, HttpClient]:
        server = Server(*answers, closes=closes)
        listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=tls)
        address, options = Address(*listening.sockets[0].getsockname()), dead_peer_options(30)
        client = HttpClient(address, tls=trusted, host=address.host, connect_timeout_s=5.0, socket_options=options)
        made.append((server, listening, client))
        return server, client

    yield make
    for server, listening, client in made:
        client.close()
        listening.close()
        await asyncio.gather(*server.tasks)
        await listening.wait_closed()


async def read(answer: HttpAnswer) -> bytes:
    pieces = []
    while piece := await answer.read():
        pieces.append(piece)
    return b"".join(pieces)


async def get(client: HttpClient, **more: bool) -> tuple[int, bytes]:
    async with client.request("GET", "/a", {"host": "x"}, **more) as answer:
        return answer.status, await read(answer)


async def test_connections_are_used_again(serve, monkeypatch):
    sized = HEAD + b"content-length: 2\r\n\r\nhi"
    server, client = await serve(sized, CHUNKED + b"2\r\nho\r\n0\r\n\r\n", sized, sized, sized)
    assert await get(client) == (200, b"hi")
    assert await get(client) == (200, b"ho")
    assert await get(client, fresh=True) == (200, b"hi")
    assert await get(client) == (200, b"hi")
    monkeypatch.setattr(http_client, "IDLE_S", -1.0)  # too old by now
    assert await get(client) == (200, b"hi")
    assert [number for number, _ in server.heads] == [0, 0, 1, 0, 2]
    assert b"connection: close" in server.heads[2][1]


async def test_request_as_sent(serve):
    server, client = await serve(HEAD + b"content-length: 0\r\n\r\n")
    async with client.request("POST", "/v1/x", {"host": "x", "a": "é"}, b"{}") as answer:
        assert await answer.read() == b""
    assert server.heads == [
        (0, "POST /v1/x HTTP/1.1\r\nhost: x\r\na: é\r\ncontent-length: 2\r\n\r\n{}".encode("latin-1"))
    ]
    with pytest.raises(ValueError, match="line break"):
        async with client.request("GET", "/", {"a": "b\r\nc: d"}):
            pass


@pytest.mark.parametrize("head", [b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"])
async def test_interim_answers_are_skipped(serve, head):
    _, client = await serve(head + b"HTTP/1.1 404 Not Found\r\ncontent-length: 1\r\n\r\nx")
    assert await get(client) == (404, b"x")


async def test_body_until_the_connection_ends(serve):
    _, client = await serve(HEAD + b"\r\nall of it", closes=True)
    assert await get(client) == (200, b"all of it")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "closed the connection"),
        (b"HTTP/1.1 20", "closed the connection"),
        (HEAD + b"content-length: 9\r\n\r\nshort", "closed the connection"),
        (CHUNKED + b"5\r\nshor", "closed the connection"),
        (b"220 mail.example ESMTP\r\n", "not an answer in HTTP/1.1"),
        (CHUNKED + b"zz\r\n", "not an answer in HTTP/1.1"),
        (HEAD + b"a: " + b"b" * 100_000, "head of the answer"),
    ],
)
async def test_broken_answers(serve, answer, message):
    server, client = await serve(answer, closes=True)
    with pytest.raises(ConnectionError, match=message):
        await get(client)
    server.answers = [HEAD + b"content-length: 0\r\n\r\n"]
    assert await get(client) == (200, b"")


async def test_bytes_behind_an_answer_end_its_connection(serve):
    sized = HEAD + b"content-length: 2\r\n\r\nhi"
    server, client = await serve(sized, sized)
    async with client.request("GET", "/", {}) as answer:
        assert await read(answer) == b"hi"
    answer.data_received(b"more")
    assert await get(client) == (200, b"hi")
    assert server.num_connections == 2


async def test_nobody_listens():
    client = HttpClient(Address("127.0.0.1", 1), connect_timeout_s=5.0)
    with pytest.raises(ConnectFailed):
        await get(client)


async def test_leaving_early_closes_the_connection(serve):
    server, client = await serve(CHUNKED + b"1\r\na\r\n")
    async with client.request("GET", "/", {}) as answer:
        assert await answer.read() == b"a"
    await server.ended.wait()
    server, client = await serve(CHUNKED + b"1\r\na\r\n")
    waiting = asyncio.create_task(get(client))
    await server.begun.wait()
    client.close()
    with pytest.raises(ConnectionError):
        await waiting


async def test_slow_reader_holds_the_server_back(serve, monkeypatch):
    monkeypatch.setattr(http_client, "MAX_WAITING_BYTES", 1000)
    body = bytes(8 << 20)
    _, client = await serve(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
    async with client.request("GET", "/", {}) as answer:
        pieces = []
        while piece := await answer.read():
            pieces.append(piece)
            await asyncio.sleep(0)
        assert b"".join(pieces) == body
        assert max(map(len, pieces)) < 1 << 20


async def test_tls(serve, tmp_path: Path):
    authority = Authority(tmp_path)
    cert, key = authority.sign("host")
    tls = ServerTls(TlsFiles(cert=cert, key=key), mutual=False, protocol=HTTP1).context
    sized = HEAD + b"content-length: 2\r\n\r\nhi"
    server, client = await serve(sized, sized, tls=tls, trusted=client_context(TlsFiles(ca=authority.ca)))
    assert [await get(client), await get(client)] == [(200, b"hi")] * 2
    assert server.num_connections == 1
    _, client = await serve(sized, tls=tls, trusted=client_context(TlsFiles()))
    with pytest.raises(ConnectFailed, match="certificate"):
        await get(client)
