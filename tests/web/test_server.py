"""The server's bounds on clients: one that does not read, and one connection too many."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

from structlog.testing import capture_logs

from tanghulu.web.server import HttpServer, address_of, listen

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


async def test_connections_have_a_bound() -> None:
    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async with served(app, max_connections=2) as (host, port):
        opened = []
        for status in (b"200", b"503"):
            reader, writer = await asyncio.open_connection(host, port)
            opened.append(writer)
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await reader.readline()).split()[1] == status
        for writer in opened:
            writer.close()
