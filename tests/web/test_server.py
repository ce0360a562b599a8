"""The server's bounds on clients: one that does not read, and one connection too many."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tanghulu.auth import handshakes
from tanghulu.auth.credentials import TlsFiles
from tanghulu.auth.tls import HTTP1, ServerTls, client_context
from tanghulu.web.server import MAX_HEADER_BYTES, MAX_PIPELINED, HttpServer, address_of, listen
from tests.rpc.service import until
from tests.tls_files import Authority

PIECE = bytes(64 << 10)
#: What kernels may hold for one connection, in both their buffers, is less.
MANY_PIECES = 4096


class Endless:
    """An application that sends more than any client takes, and notes when the client is gone."""

    def __init__(self) -> None:
        self.num_sent = 0
        self.gone = asyncio.Event()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        watching = asyncio.create_task(self._watch(receive))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while self.num_sent < MANY_PIECES and not self.gone.is_set():
            await send({"type": "http.response.body", "body": PIECE, "more_body": True})
            self.num_sent += 1
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        await watching

    async def _watch(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.gone.set()


@contextlib.asynccontextmanager
async def served(app: Any, **options: Any) -> AsyncIterator[tuple[str, int]]:
    listener = listen("127.0.0.1", 0)
    server = HttpServer(app, 0.0, **options)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    address = address_of(listener)
    try:
        yield address.host, address.port
    finally:
        server.stop()
        server.force_exit = True
        await serving
        listener.close()


async def test_a_client_that_does_not_read_is_hung_up_on() -> None:
    app = Endless()
    async with served(app, stall_s=0.2) as address:
        with socket.socket() as client, capture_logs() as logs:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await asyncio.get_running_loop().sock_connect(client, address)
            await asyncio.get_running_loop().sock_sendall(client, b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n")
            await asyncio.wait_for(app.gone.wait(), 60)
    assert app.num_sent < MANY_PIECES
    (line,) = [line for line in logs if line["event"] == "http.reader_too_slow"]
    assert line["path"] == "/slow"


async def _echo(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Reads the body, and answers with its length."""
    num_bytes, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        num_bytes += len(message.get("body", b""))
        more = message.get("more_body", False)
    body = str(num_bytes).encode()
    head = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": body})


async def _sent(address: tuple[str, int], *pieces: bytes) -> bytes:
    """What comes back until the connection closes, or until a whole answer is there."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length"))
        return head + await reader.readexactly(int(length.partition(b":")[2]))
    except (ConnectionError, asyncio.IncompleteReadError):
        return b""
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_a_request_cancelled_at_shutdown_is_answered_with_the_reason() -> None:
    begun = asyncio.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    listener = listen("127.0.0.1", 0)
    server = HttpServer(endless, 1.4)
    server.start(listener)
    assert server.config.timeout_graceful_shutdown > 1.4
    asked = asyncio.create_task(_sent((server.address.host, server.address.port), HEAD + b"content-length: 0\r\n\r\n"))
    await begun.wait()
    for task in server.server_state.tasks:
        task.cancel()
    head, _, body = (await asked).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503")
    assert b"retry-after: 1" in head
    assert "shutting down" in json.loads(body)["error"]["message"]
    server.stop()
    await server.serving
    listener.close()


HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"
MANY = 256


@pytest.mark.parametrize(
    "pieces",
    [
        [b"x-a: " + b"y" * MAX_HEADER_BYTES + b"\r\n\r\n"],
        [b"x-a: " + b"y" * (MAX_HEADER_BYTES // 2) + b"\r\nx-b: " + b"y" * (MAX_HEADER_BYTES // 2) + b"\r\n\r\n"],
        [b"a:b\r\n" * (MAX_HEADER_BYTES // 32) + b"\r\n"],
        [b"y" * MAX_HEADER_BYTES + b": z\r\n\r\n"],
        [b"x-a: ", *[b"y" * 16_384] * MANY],
    ],
    ids=["one value", "two values", "many fields", "a name", "a value that does not end"],
)
async def test_a_header_beyond_its_bound_is_refused(pieces: list[bytes]) -> None:
    async with served(_echo) as address:
        answer = await _sent(address, HEAD + pieces[0], *pieces[1:])
        # While it is still sending, the answer may be lost with the connection.
        is_refused = answer.startswith(b"HTTP/1.1 431") and b"header_too_large" in answer
        assert is_refused or (not answer and len(pieces) > 1)
        fits = b"x-a: " + b"y" * (MAX_HEADER_BYTES - 1024) + b"\r\ncontent-length: 2\r\n\r\nhi"
        assert (await _sent(address, HEAD + fits)).endswith(b"\r\n\r\n2")


async def test_a_url_beyond_the_bound_is_refused() -> None:
    async with served(_echo) as address:
        answer = await _sent(address, b"GET /" + b"y" * MAX_HEADER_BYTES + b" HTTP/1.1\r\nhost: x\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 431")


@pytest.mark.parametrize("last", [b"x: " + b"y" * 16_384 + b"\r\n", b"y" * 16_384], ids=["fields", "one value"])
async def test_a_trailer_beyond_its_bound_ends_the_connection(last: bytes) -> None:
    begin = HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\nhi\r\n"
    async with served(_echo) as address:
        assert (await _sent(address, begin + b"0\r\nx-a: b\r\n\r\n")).endswith(b"\r\n\r\n2")
        assert await _sent(address, begin + b"0\r\nx-a: ", *[last] * MANY) == b""
        assert await _sent(address, begin + b"2;x=", *[b"y" * 16_384] * MANY) == b""


async def test_a_long_body_is_no_header() -> None:
    chunk = b"10000\r\n" + b"z" * 65_536 + b"\r\n"
    async with served(_echo) as address:
        begin = HEAD + b"transfer-encoding: chunked\r\n\r\n"
        assert (await _sent(address, begin, *[chunk] * 8, b"0\r\n\r\n")).endswith(str(8 * 65_536).encode())
        plain = HEAD + b"content-length: 524288\r\n\r\n"
        assert (await _sent(address, plain, *[b"z" * 65_536] * 8)).endswith(b"524288")


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "apart"])
async def test_the_body_of_a_request_that_offers_http_2_is_its_body(at_once: bool) -> None:
    """Java's client offers it; nor may what others think to be a body become a request."""
    body = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
    async with served(_echo) as (host, port):
        for protocol, expected in ((b"h2c", b"200"), (b"other", b"400")):
            offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: %s\r\nHTTP2-Settings: x\r\n" % protocol
            head = HEAD + offer + b"content-length: %d\r\n\r\n" % len(body)
            reader, writer = await asyncio.open_connection(host, port)
            for piece in (head + body,) if at_once else (head, body):
                writer.write(piece)
                await asyncio.sleep(0.05)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 " + expected), answer
            writer.write(b"GET /closes HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                assert (await reader.read()).count(b"HTTP/1.1") == (expected == b"200"), "no answer but to the second"
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


async def test_requests_that_wait_on_one_connection_have_a_bound() -> None:
    one = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
    async with served(_echo) as (host, port):
        for count, is_served in ((MAX_PIPELINED, True), (1000, False)):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(one * count)
            with contextlib.suppress(ConnectionError):
                answers = [await reader.readuntil(b"\r\n\r\n0") for _ in range(count)] if is_served else []
                assert len(answers) == (count if is_served else 0)
                if not is_served:
                    assert (await reader.read()).count(b"200 OK") < count
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


async def test_a_client_that_reads_slowly_is_served() -> None:
    """It takes several ``stall_s`` until the server has nothing more than it may keep, and reads all the while."""
    body = b"x" * (6 << 20)

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        head = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": body})

    async with served(app, stall_s=0.5) as address:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
            client.setblocking(False)
            loop, got = asyncio.get_running_loop(), 0
            await loop.sock_connect(client, address)
            await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            while got < len(body):
                await asyncio.sleep(0.02)
                piece = await loop.sock_recv(client, 64 << 10)
                assert piece, f"hung up on after {got} bytes"
                got += len(piece)


class Held:
    """An application whose answers wait for ``gate``, but for probes."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.num_held = 0

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["path"] == "/held":
            self.num_held += 1
            await self.gate.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


@contextlib.asynccontextmanager
async def asked(host: str, port: int, *paths: bytes) -> AsyncIterator[list[asyncio.StreamReader]]:
    """A connection for each of ``paths``, on which it is asked for; "" is a connection that sends nothing."""
    opened = []
    for path in paths:
        reader, writer = await asyncio.open_connection(host, port)
        opened.append((reader, writer))
        if path:
            writer.write(b"GET %s HTTP/1.1\r\nhost: x\r\n\r\n" % path)
    try:
        yield [reader for reader, _ in opened]
    finally:
        for _, writer in opened:
            writer.close()


async def status_of(reader: asyncio.StreamReader) -> bytes:
    return (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)).split()[1]


async def test_connections_with_requests_have_a_bound_and_probes_are_answered_beyond_it() -> None:
    app = Held()
    async with (
        served(app, max_connections=2) as (host, port),
        asked(host, port, b"/held", b"/held") as held,
    ):
        await until(lambda: app.num_held == 2)
        async with asked(host, port, b"/", b"/live", b"/ready") as (refused, *probes):
            assert (await refused.readline()).split()[1] == b"503"
            head, _, body = (await refused.read()).partition(b"\r\n\r\n")
            assert json.loads(body)["error"]["code"] == "too_many_connections"
            assert {b"retry-after: 1", b"connection: close", b"content-type: application/json"} <= {
                *head.split(b"\r\n")
            }
            assert b"\r\nx-request-id: " in head
            assert [await status_of(probe) for probe in probes] == [b"200", b"200"]
        app.gate.set()
        assert [await status_of(each) for each in held] == [b"200", b"200"]


@pytest.mark.parametrize("path", [b"/", b""], ids=["idle", "silent"])
async def test_connections_without_a_request_make_way(path: bytes) -> None:
    """A stranger who holds all connections open keeps nobody out."""
    app = Held()
    async with served(app, max_connections=3) as (host, port), asked(host, port, *[path] * 8) as crowd:
        for reader in crowd[:5]:
            with contextlib.suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), 60)  # to its end: it was hung up on
        async with asked(host, port, b"/", b"/held", b"/") as (first, held, second):
            assert await status_of(first) == b"200"
            assert await status_of(second) == b"200"
            app.gate.set()
            assert await status_of(held) == b"200"


async def test_what_is_not_http_gets_an_error_in_the_usual_shape() -> None:
    async with served(Endless()) as (host, port):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"hello there\r\n\r\n")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert json.loads(body)["error"]["code"] == "invalid_request"
        writer.close()


async def _in_two_pieces(scope: dict[str, Any], receive: Any, send: Any) -> None:
    headers = [(b"content-length", b"6")] if scope["path"] == "/known" else []
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"abc", "more_body": True})
    await send({"type": "http.response.body", "body": b"def"})


@pytest.mark.parametrize("path", [b"/known", b"/unknown"])
@pytest.mark.parametrize(("method", "body"), [(b"GET", b"abcdef"), (b"HEAD", b"")])
async def test_a_client_of_http_1_0_gets_no_chunks(path: bytes, method: bytes, body: bytes) -> None:
    async with served(_in_two_pieces) as (host, port):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"%s %s HTTP/1.0\r\n\r\n" % (method, path))
        head, _, shown = (await reader.read()).partition(b"\r\n\r\n")
        assert shown == body
        assert b"transfer-encoding" not in head
        assert head.startswith(b"HTTP/1.1 200 ")
        assert (b"content-length: 6" in head) == (path == b"/known")
        writer.close()


async def test_clients_that_do_not_end_a_handshake_make_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshakes, "MAX_HANDSHAKES", 3)
    authority = Authority(tmp_path)
    cert, key = authority.sign("host")
    tls = ServerTls(TlsFiles(cert=cert, key=key), mutual=False, protocol=HTTP1)
    async with served(Held(), tls=tls.context) as (host, port), asked(host, port, *[b""] * 8) as silent:
        for reader in silent[:5]:
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 60) == b""
        trusting = client_context(TlsFiles(ca=authority.ca))
        reader, writer = await asyncio.open_connection(host, port, ssl=trusting, server_hostname="127.0.0.1")
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert await status_of(reader) == b"200"
        writer.close()
