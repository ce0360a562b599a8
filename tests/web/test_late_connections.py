"""A connection that comes while the server ends: it is cut, and not left open behind it."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest
from starlette.responses import PlainTextResponse

from tanghulu.types import Address
from tanghulu.web.server import HttpServer, address_of, listen


@pytest.mark.parametrize("num_turns", range(5))  # of the loop, in which the connection is accepted and made
async def test_who_is_accepted_while_the_server_ends_is_cut(num_turns: int) -> None:
    listener = listen("127.0.0.1", 0)
    address: Address = address_of(listener)
    server = HttpServer(PlainTextResponse("here"), grace_s=1.0)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:  # noqa: ASYNC110  # uvicorn says it nowhere else
        await asyncio.sleep(0)
    with socket.create_connection((address.host, address.port)) as late:  # in the kernel, and not accepted yet
        for _ in range(num_turns):
            await asyncio.sleep(0)
        server.stop()
        await serving
        assert not server.server_state.connections
        late.settimeout(30)
        with contextlib.suppress(ConnectionResetError):
            assert late.recv(1) == b""
