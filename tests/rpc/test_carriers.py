"""Both clients against the server behind the fast port, over Unix and TCP, and gRPC on the same port."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from typing import Any

import pytest

from tanghulu.errors import ChunkNotFound, DeadlineExceeded, InvalidRequest, NodeUnavailable, Overloaded, TanghuluError
from tanghulu.rpc import fast_server
from tanghulu.rpc.fast_aio import AsyncFastConnection
from tanghulu.rpc.fast_client import Call, FastConnection
from tanghulu.rpc.fast_server import MAX_CALLS_IN_FLIGHT
from tanghulu.rpc.frames import ERROR, HEAD, MAX_ATTACHMENT_BYTES, PREAMBLE, encode_head
from tanghulu.types import Address
from tests.rpc.service import (
    BLOAT,
    BROKEN,
    ECHO,
    FAIL,
    HANG,
    LATER,
    SLOW,
    SLOW_BROKEN,
    Answer,
    Ask,
    Served,
    head_of,
    until,
)

REPLY = Answer


def ask(*keys: str) -> Ask:
    return Ask(keys)


class BlockingClient:
    """The blocking client with the asyncio one's face, so that one test body runs against both."""

    def __init__(self, connection: FastConnection) -> None:
        self.connection = connection

    async def call(self, *args: Any, **kwargs: Any) -> Any:
        return await asyncio.to_thread(self.connection.call, *args, **kwargs)

    @property
    def closed(self) -> bool:
        return self.connection.closed

    async def close(self) -> None:
        self.connection.close()


@pytest.fixture(params=["blocking-unix", "blocking-tcp", "aio-unix", "aio-tcp"])
async def client(request: pytest.FixtureRequest, served: Served):
    kind, _, carrier = request.param.partition("-")
    path = served.fast_port.unix_path if carrier == "unix" else None
    if kind != "aio":
        made: Any = BlockingClient(await asyncio.to_thread(FastConnection, served.fast_port.address, path))
    else:
        made = await AsyncFastConnection.connect(served.fast_port.address, path)
    yield made
    await made.close()


async def test_request_and_attachment_come_back(client) -> None:
    reply = await client.call(ECHO, ask("a", "b"), REPLY, [b"raw", bytearray(b" bytes"), memoryview(b"!")])
    assert list(reply.message.node_ids) == ["a", "b"]
    assert bytes(reply.attachment) == b"raw bytes!"


async def test_large_attachments(client) -> None:
    value = os.urandom(8 << 20)
    reply = await client.call(ECHO, ask(), REPLY, [value])
    assert reply.attachment == value


async def test_typed_error_of_the_peer(client) -> None:
    with pytest.raises(ChunkNotFound, match="no k"):
        await client.call(FAIL, ask("k"), REPLY)
    assert not client.closed
    assert (await client.call(ECHO, ask("still"), REPLY)).message.node_ids == ["still"]


@pytest.mark.parametrize("method", [BROKEN, SLOW_BROKEN])
async def test_a_handlers_bug_is_internal_and_the_connection_lives(client, method: int) -> None:
    with pytest.raises(TanghuluError, match="internal error") as caught:
        await client.call(method, ask(), REPLY)
    assert caught.value.code == "INTERNAL"
    await client.call(ECHO, ask(), REPLY)


async def test_unknown_method(client) -> None:
    with pytest.raises(InvalidRequest, match="method 999 is not served"):
        await client.call(999, ask(), REPLY)


async def test_a_large_request_with_others_behind_it(client) -> None:
    """Its rest is read straight into its place; what follows in the same segments is not lost."""
    large = os.urandom(3 << 20)
    values = [large, *(bytes([i]) * 10 for i in range(20)), large[::-1]]
    replies = await asyncio.gather(*(client.call(ECHO, ask(), REPLY, [value]) for value in values))
    assert [bytes(reply.attachment) for reply in replies] == values


async def test_a_request_that_is_too_large_is_refused_here(client) -> None:
    with pytest.raises(InvalidRequest, match="send fewer"):
        await client.call(ECHO, ask(), REPLY, [bytes(MAX_ATTACHMENT_BYTES + 1)])


async def test_a_reply_that_is_too_large_is_a_typed_error(client) -> None:
    with pytest.raises(InvalidRequest, match="send fewer"):
        await client.call(BLOAT, ask(), REPLY)
    await client.call(ECHO, ask(), REPLY)


async def test_bytes_that_are_no_message(served: Served) -> None:
    reader, writer = await asyncio.open_connection(str(served.fast_port.address.host), served.fast_port.address.port)
    writer.write(PREAMBLE + encode_head(ECHO, 7, 4, 0) + b"\xff\xff\xff\xff")
    body, _, method, call_id = head_of(await reader.readexactly(HEAD.size))
    assert (method, call_id) == (ERROR, 7)
    assert b"INVALID_REQUEST" in await reader.readexactly(body)
    writer.close()
    await writer.wait_closed()


async def test_deadline(client) -> None:
    with pytest.raises(DeadlineExceeded):
        await client.call(HANG, ask(), REPLY, deadline_s=0.1)


async def test_the_asyncio_connection_outlives_a_missed_deadline(served: Served) -> None:
    connection = await AsyncFastConnection.connect(served.fast_port.address)
    with pytest.raises(DeadlineExceeded):
        await connection.call(SLOW, ask(), REPLY, deadline_s=0.05)
    served.gate.set()
    assert (await connection.call(ECHO, ask("x"), REPLY)).message.node_ids == ["x"]
    await connection.close()


async def test_a_missed_deadline_spends_the_blocking_connection(served: Served) -> None:
    connection = await asyncio.to_thread(FastConnection, served.fast_port.address)
    with pytest.raises(DeadlineExceeded):
        await asyncio.to_thread(connection.call, HANG, ask(), REPLY, deadline_s=0.05)
    assert connection.closed
    with pytest.raises(NodeUnavailable, match="is closed"):
        connection.call(ECHO, ask(), REPLY)


async def test_waiting_for_another_thread_counts_against_the_deadline(served: Served) -> None:
    connection = await asyncio.to_thread(FastConnection, served.fast_port.address)
    first = asyncio.create_task(asyncio.to_thread(connection.call, SLOW, ask(), REPLY))
    await until(lambda: served.waiting == 1)
    with pytest.raises(DeadlineExceeded, match="other calls"):
        await asyncio.to_thread(connection.call, ECHO, ask(), REPLY, deadline_s=0.05)
    served.gate.set()
    await first
    connection.close()


async def test_replies_come_in_any_order(served: Served) -> None:
    connection = await AsyncFastConnection.connect(served.fast_port.address)
    slow = asyncio.create_task(connection.call(SLOW, ask("slow"), REPLY))
    assert (await connection.call(ECHO, ask("quick"), REPLY)).message.node_ids == ["quick"]
    served.gate.set()
    assert (await slow).message.node_ids == ["slow"]
    await connection.close()


async def test_pipelined_calls_keep_their_places_and_errors(served: Served) -> None:
    connection = await asyncio.to_thread(FastConnection, None, served.fast_port.unix_path)
    calls = [Call(FAIL if n % 3 == 0 else ECHO, ask(str(n)), REPLY) for n in range(100)]
    outcomes = await asyncio.to_thread(connection.call_many, calls)
    for number, outcome in enumerate(outcomes):
        if number % 3 == 0:
            assert isinstance(outcome, ChunkNotFound)
        else:
            assert not isinstance(outcome, TanghuluError)
            assert outcome.message.node_ids == [str(number)]
    connection.close()


async def test_answers_may_come_later_in_any_order_and_number(served: Served) -> None:
    connection = await AsyncFastConnection.connect(served.fast_port.address)
    assert (await connection.call(LATER, ask("now"), REPLY)).message.node_ids == ["now"]
    calls = [asyncio.create_task(connection.call(LATER, ask(str(n)), REPLY)) for n in range(2 * MAX_CALLS_IN_FLIGHT)]
    await until(lambda: len(served.later) >= MAX_CALLS_IN_FLIGHT)
    other = await AsyncFastConnection.connect(served.fast_port.address)
    await other.call(ECHO, ask(), REPLY)  # another connection is served all the same
    while not all(call.done() for call in calls):
        while served.later:
            served.later.pop()()
        await asyncio.sleep(0)
    assert [call.result().message.node_ids for call in calls] == [[str(n)] for n in range(len(calls))]
    await connection.close()
    await other.close()


async def test_nobody_waits_for_the_replies_of_what_is_posted(served: Served) -> None:
    connection = await asyncio.to_thread(FastConnection, None, served.fast_port.unix_path)

    def work() -> None:
        for n in range(300):
            connection.post(Call(FAIL if n % 3 else ECHO, ask(f"posted {n}"), REPLY, [bytes(5000)]))
            if n % 100 == 0:
                assert connection.call(ECHO, ask(f"wanted {n}"), REPLY).message.node_ids == [f"wanted {n}"]
        outcomes = connection.call_many([Call(ECHO, ask(str(n)), REPLY) for n in range(3)])
        assert [o.message.node_ids[0] for o in outcomes if not isinstance(o, TanghuluError)] == ["0", "1", "2"]

    await asyncio.to_thread(work)
    connection.close()
    with pytest.raises(NodeUnavailable):
        connection.post(Call(ECHO, ask("late"), REPLY))


@pytest.mark.parametrize("over_unix", [True, False])
async def test_pipelining_more_than_the_sockets_hold_does_not_lock_up(served: Served, over_unix: bool) -> None:
    path = served.fast_port.unix_path if over_unix else None
    connection = await asyncio.to_thread(FastConnection, served.fast_port.address, path)
    value = bytes(300_000)
    outcomes = await asyncio.to_thread(
        connection.call_many, [Call(ECHO, ask(), REPLY, [value]) for _ in range(60)], deadline_s=10
    )
    assert all(not isinstance(o, TanghuluError) and len(o.attachment) == 300_000 for o in outcomes)
    connection.close()


async def test_threads_share_a_blocking_connection(served: Served) -> None:
    connection = await asyncio.to_thread(FastConnection, served.fast_port.address)
    wrong: list[str] = []

    def work(name: str) -> None:
        for n in range(50):
            if connection.call(ECHO, ask(f"{name}{n}"), REPLY).message.node_ids != [f"{name}{n}"]:
                wrong.append(name)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    await asyncio.to_thread(lambda: [thread.join() for thread in threads])
    assert not wrong
    connection.close()


async def test_calls_in_flight_are_bounded(served: Served) -> None:
    connection = await AsyncFastConnection.connect(served.fast_port.address)
    filler = bytes(4096)  # so that the calls do not all stand in one read of the server
    calls = [asyncio.create_task(connection.call(SLOW, ask(), REPLY, [filler])) for _ in range(1000)]
    await until(lambda: served.waiting >= fast_server.MAX_CALLS_IN_FLIGHT)
    served.gate.set()
    await asyncio.gather(*calls)
    assert served.most_waiting < 500
    await connection.close()


async def test_too_many_connections_are_refused_with_a_reason(served: Served) -> None:
    served.service.max_connections = 1
    first = await AsyncFastConnection.connect(served.fast_port.address)
    await first.call(ECHO, ask(), REPLY)
    second = await asyncio.to_thread(FastConnection, served.fast_port.address)
    with pytest.raises(Overloaded, match="has reached its limit"):
        await asyncio.to_thread(second.call, ECHO, ask(), REPLY)
    third = await AsyncFastConnection.connect(served.fast_port.address)
    with pytest.raises(NodeUnavailable, match="has reached its limit"):
        await third.call(ECHO, ask(), REPLY)
    await first.close()
    await third.close()


async def test_a_server_that_goes_away_fails_calls_in_flight(served: Served) -> None:
    aio = await AsyncFastConnection.connect(served.fast_port.address)
    blocking = await asyncio.to_thread(FastConnection, None, served.fast_port.unix_path)
    calls = [
        asyncio.create_task(aio.call(HANG, ask(), REPLY)),
        asyncio.create_task(asyncio.to_thread(blocking.call, HANG, ask(), REPLY)),
    ]
    await until(lambda: len(served.service.peers) == 2)
    await served.fast_port.close(0.0)
    for call in calls:
        with pytest.raises(NodeUnavailable):
            await call
    assert aio.closed
    assert blocking.closed


async def test_nobody_listens(tmp_path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = Address("127.0.0.1", free.getsockname()[1])
    with pytest.raises(NodeUnavailable, match="cannot connect"):
        FastConnection(address)
    with pytest.raises(NodeUnavailable, match="cannot connect"):
        await AsyncFastConnection.connect(address)
    with pytest.raises(NodeUnavailable, match="no TCP address"):
        FastConnection(None, str(tmp_path / "none"))
    with pytest.raises(NodeUnavailable, match="no TCP address"):
        await AsyncFastConnection.connect(None, str(tmp_path / "none"))


async def test_on_close_is_called_and_peers_are_named(served: Served) -> None:
    connection = await AsyncFastConnection.connect(None, served.fast_port.unix_path)
    await connection.call(ECHO, ask(), REPLY)
    (peer,) = served.service.peers
    assert peer.is_unix
    assert peer.pid == os.getpid()
    await connection.close()
    await until(lambda: served.closed == 1)
    assert not served.service.peers
