"""``rpc.streams``: a generator's messages at the other end of a connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from tanghulu.errors import ChunkNotFound, NodeUnavailable, Overloaded, PeerSilent, TanghuluError
from tanghulu.rpc import streams
from tanghulu.rpc.fast_aio import AsyncFastConnection
from tanghulu.rpc.fast_server import AnswerStream, Peer
from tanghulu.rpc.methods import Method, Rule
from tanghulu.rpc.streams import receive_all, send_all
from tanghulu.rpc.wire import FastMessage
from tests.rpc.service import Served, until


class Count(FastMessage, frozen=True):
    """``until`` other than 0 ends the stream; ``padding`` makes its messages large."""

    until: int = 0
    padding: int = 0


class Number(FastMessage, frozen=True):
    """One message; 0 is a beat."""

    number: int = 0
    padding: bytes = b""


COUNT = Method(50, "count", Count, Number, Rule("count", None))


class Counting:
    """A process that counts, up to ``until`` or an error in its place."""

    def __init__(self, served: Served) -> None:
        self.address = served.fast_port.address
        self.sent = 0
        self.is_closed = False
        self.error: Exception | None = None
        self.pace = asyncio.Event()
        self.pace.set()
        served.service.register(COUNT, self._count)

    def _count(self, peer: Peer, request: Count, attachment: memoryview) -> AnswerStream:
        return send_all(peer, self._numbers(request), Number())

    async def _numbers(self, request: Count) -> AsyncGenerator[Number, None]:
        try:
            while not request.until or self.sent < request.until:
                await self.pace.wait()
                self.sent += 1
                yield Number(self.sent, bytes(request.padding))
            if self.error is not None:
                raise self.error
        finally:
            self.is_closed = True

    async def receive(self, request: Count, silence_s: float | None = None) -> AsyncGenerator[Number, None]:
        connection = await AsyncFastConnection.connect(self.address)
        async with aclosing(receive_all(connection, COUNT.call(request), silence_s)) as messages:
            async for message in messages:
                yield message


async def _numbers(messages: AsyncGenerator[Number, None]) -> list[int]:
    """All that come until the server hangs up."""
    received: list[int] = []
    with contextlib.suppress(NodeUnavailable):
        async for message in messages:
            received.append(message.number)
    return received


@pytest.fixture
async def counting(served: Served) -> Counting:
    return Counting(served)


async def test_messages_come_in_order_and_then_the_connection_ends(counting: Counting) -> None:
    assert await _numbers(counting.receive(Count(until=100))) == list(range(1, 101))


async def test_a_slow_consumer_holds_up_the_server_and_loses_nothing(counting: Counting) -> None:
    async with aclosing(counting.receive(Count(until=2000, padding=1 << 16))) as messages:
        first = await anext(messages)
        await until(lambda: counting.sent >= streams.MAX_WAITING)
        before = -1
        while before != counting.sent:  # until it has come to a halt
            before = counting.sent
            await asyncio.sleep(0.2)
        assert counting.sent < 2000
        assert [first.number, *await _numbers(messages)] == list(range(1, 2001))


@pytest.mark.parametrize("error", [ChunkNotFound("gone"), ValueError("a bug")])
async def test_an_error_of_the_generator_ends_the_stream(counting: Counting, error: Exception) -> None:
    counting.error = error
    with pytest.raises(ChunkNotFound if isinstance(error, ChunkNotFound) else TanghuluError) as raised:
        async for _ in counting.receive(Count(until=3)):
            pass
    assert ("gone" in raised.value.message) == isinstance(error, ChunkNotFound)


async def test_the_generator_is_closed_with_the_connection(counting: Counting) -> None:
    async with aclosing(counting.receive(Count())) as messages:
        assert (await anext(messages)).number == 1
    await until(lambda: counting.is_closed)


async def test_a_connection_carries_one_stream(counting: Counting) -> None:
    counting.pace.clear()
    connection = await AsyncFastConnection.connect(counting.address)
    async with aclosing(receive_all(connection, COUNT.call(Count()))) as messages:
        assert not (await anext(messages)).number
        with pytest.raises(Overloaded, match="another connection"):
            await connection.call(COUNT.number, Count(), Number)


async def test_beats_come_while_there_is_nothing_and_without_them_the_peer_is_silent(
    counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting.pace.clear()
    monkeypatch.setattr(streams, "BEAT_S", 0.01)
    async with aclosing(counting.receive(Count(), silence_s=30.0)) as messages:
        assert [(await anext(messages)).number for _ in range(3)] == [0, 0, 0]
    monkeypatch.setattr(streams, "BEAT_S", 30.0)
    with pytest.raises(PeerSilent, match="sent nothing"):
        async for _ in counting.receive(Count(), silence_s=0.05):
            pass
