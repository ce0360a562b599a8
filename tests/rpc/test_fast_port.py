"""The fast port: the fast lane and gRPC on one port, what it refuses, and its private socket."""

from __future__ import annotations

import asyncio
import os

import pytest

from tanghulu.errors import (
    ChunkNotFound,
    ConfigError,
    TanghuluError,
)
from tanghulu.rpc.fast_port import FastPort
from tanghulu.rpc.fast_server import FastService
from tanghulu.rpc.frames import ERROR, HEAD, PREAMBLE, encode_head
from tanghulu.rpc.wire import Failure, encode, parser_of
from tests.rpc.service import ECHO, Answer, Ask, Served, head_of

REPLY = Answer


def ask(*keys: str) -> Ask:
    return Ask(keys)


async def test_a_connection_of_another_protocol_is_closed(served: Served) -> None:
    for first in (b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", bytes(range(64))):
        reader, writer = await asyncio.open_connection(served.fast_port.address.host, served.fast_port.address.port)
        writer.write(first)
        assert await reader.read() == b""
        writer.close()
    reader, writer = await asyncio.open_connection(served.fast_port.address.host, served.fast_port.address.port)
    writer.write(PREAMBLE + b"\xff" * 16)
    body, _, method, call_id = head_of(await reader.readexactly(HEAD.size))
    assert (method, call_id) == (ERROR, 0)
    assert b"INVALID_REQUEST" in await reader.readexactly(body)
    assert await reader.read() == b""
    writer.close()


async def test_the_preamble_may_come_in_pieces(served: Served) -> None:
    reader, writer = await asyncio.open_connection(served.fast_port.address.host, served.fast_port.address.port)
    message = encode(ask("k"))
    for byte in PREAMBLE + encode_head(ECHO, 3, len(message), 0) + message:
        writer.write(bytes([byte]))
        await writer.drain()
    body, _, method, call_id = head_of(await reader.readexactly(HEAD.size))
    assert (method, call_id) == (ECHO, 3)
    assert parser_of(Answer)(await reader.readexactly(body)).node_ids == ["k"]
    writer.close()


async def test_a_taken_port_refuses_to_start(served: Served, tmp_path) -> None:
    other = FastPort(FastService(), tmp_path, "other")
    with pytest.raises(ConfigError, match="choose another --port"):
        await other.start("127.0.0.1", served.fast_port.address.port)
    await other.close(0.0)


async def test_a_run_directory_that_is_too_long_refuses_to_start(tmp_path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    fast_port = FastPort(FastService(), deep, "x")
    with pytest.raises(ConfigError, match="shorter --run-dir"):
        await fast_port.start("127.0.0.1", 0)
    await fast_port.close(0.0)


async def test_the_socket_is_private(served: Served) -> None:
    assert os.stat(served.fast_port.unix_path).st_mode & 0o777 == 0o600


def test_a_failure_carries_every_error() -> None:
    error = parser_of(Failure)(encode(Failure.of(ChunkNotFound("gone")))).error
    assert isinstance(error, ChunkNotFound)
    assert error.message == "gone"
    assert type(parser_of(Failure)(encode(Failure("FROM_A_LATER_VERSION", "x"))).error) is TanghuluError
