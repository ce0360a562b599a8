"""Peers that ask for much and take little: what waits for them stays small, and others are answered meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import warnings
from typing import Any
from unittest.mock import Mock

import pytest

from tanghulu.rpc import fast_server, slow_peers
from tanghulu.rpc.fast_aio import AsyncFastConnection
from tanghulu.rpc.fast_server import Peer
from tanghulu.rpc.frames import HEAD, PREAMBLE, FrameReader
from tanghulu.rpc.methods import Method
from tanghulu.rpc.slow_peers import PRESSED_S, SLOW_PEER_S, PendingBytes, SlowPeer
from tanghulu.rpc.wire import encode
from tanghulu.runtime.clock import LEAST_BYTES_S, LeastRate
from tests.rpc.service import ECHO, LATER, READABLE, SLOW, Answer, Ask, Served, until

ASK, REPLY = Ask(keys=["k"]), Answer
LARGE = 40
ANSWER = bytes(1 << 20)
NUM_CALLS = 400


def request_of(method: int, call_id: int) -> bytes:
    body = encode(ASK)
    return HEAD.pack(len(body), 0, method, 0, call_id) + body


class Glutton:
    """Asks for ``NUM_CALLS`` large answers at once, and reads them only when it is told to."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.num_answered = 0

        def large(peer: Peer, request: Ask, attachment: memoryview) -> Any:
            self.num_answered += 1
            return Answer(), [ANSWER]

        served.service.register(Method(LARGE, "large", Ask, REPLY, READABLE), large)

    async def ask(self) -> None:
        address = self.served.fast_port.address
        self.reader, self.writer = await asyncio.open_connection(address.host, address.port, limit=4096)
        self.writer.write(PREAMBLE + b"".join(request_of(LARGE, call_id) for call_id in range(1, NUM_CALLS + 1)))
        await until(lambda: self.served.service.unsent.num_bytes > 0)

    async def close(self) -> None:
        self.writer.transport.abort()
        await until(lambda: self.served.service.unsent.num_bytes == 0)


@pytest.fixture
async def glutton(served: Served):
    made = Glutton(served)
    await made.ask()
    yield made
    await made.close()
    served.service.unsent.check()


async def test_who_does_not_read_is_not_answered(served: Served, glutton: Glutton) -> None:
    other = await AsyncFastConnection.connect(served.fast_port.address)
    for _ in range(50):
        assert (await other.call(ECHO, ASK, REPLY)).message.node_ids == ["k"]
    await other.close()
    assert glutton.num_answered < NUM_CALLS / 4
    assert served.service.unsent.num_bytes <= fast_server.MAX_STEP_BYTES + len(ANSWER)


async def test_who_reads_again_gets_every_answer_in_order(served: Served, glutton: Glutton) -> None:
    reader, call_ids = FrameReader(), []
    while len(call_ids) < NUM_CALLS:
        for frame in reader.feed(await asyncio.wait_for(glutton.reader.read(1 << 20), 30)):
            assert len(frame.attachment) == len(ANSWER)
            call_ids.append(frame.call_id)
    assert call_ids == list(range(1, NUM_CALLS + 1))
    glutton.writer.write(request_of(ECHO, 7))
    assert (await asyncio.wait_for(glutton.reader.read(HEAD.size), 30))[12:16] == (7).to_bytes(4, "little")


async def test_calls_that_wait_hold_up_those_behind(served: Served) -> None:
    """However many stand in one read, no more are under way than may be; all are answered in the end."""
    address = served.fast_port.address
    num_calls = 3 * fast_server.MAX_CALLS_IN_FLIGHT
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(PREAMBLE + b"".join(request_of(LATER, call_id) for call_id in range(1, num_calls + 1)))
    await until(lambda: len(served.later) >= fast_server.MAX_CALLS_IN_FLIGHT)
    other = await AsyncFastConnection.connect(address)
    await other.call(ECHO, ASK, REPLY)
    assert len(served.later) == fast_server.MAX_CALLS_IN_FLIGHT
    frames, num_answered = FrameReader(), 0
    while num_answered < num_calls:
        while served.later:
            served.later.pop()()
        num_answered += len(list(frames.feed(await asyncio.wait_for(reader.read(1 << 16), 30))))
    await other.close()
    writer.close()


async def test_who_takes_nothing_while_the_process_is_full_is_hung_up_on(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow_peers, "_LOOK_S", 0.01)
    monkeypatch.setattr(slow_peers, "PRESSED_S", 0.05)
    served.service.unsent.most_bytes = 1
    glutton = Glutton(served)
    await glutton.ask()
    await until(lambda: not served.service.peers)
    assert served.service.unsent.num_bytes == 0
    await glutton.close()


async def begun_request(served: Served) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection on which the first bytes of a large request have come."""
    address = served.fast_port.address
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(PREAMBLE + HEAD.pack(1 << 20, 0, ECHO, 0, 1) + b"the first")
    await until(lambda: served.service.coming.num_bytes > 0)
    return reader, writer


@pytest.mark.parametrize("pressed", [False, True])
async def test_whose_request_comes_too_slowly_is_hung_up_on(
    served: Served, monkeypatch: pytest.MonkeyPatch, pressed: bool
) -> None:
    monkeypatch.setattr(slow_peers, "_LOOK_S", 0.01)
    if pressed:
        served.service.coming.most_bytes = 1
    monkeypatch.setattr(slow_peers, "PRESSED_S" if pressed else "SLOW_PEER_S", 0.05)
    reader, writer = await begun_request(served)
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(1), 30) == b""
    await until(lambda: not served.service.peers)
    assert served.service.coming.num_bytes == 0
    served.service.coming.check()
    writer.close()


async def test_a_request_that_has_come_is_not_counted_any_more(served: Served) -> None:
    reader, writer = await begun_request(served)
    writer.write(bytes((1 << 20) - len(b"the first")))
    await asyncio.wait_for(reader.readexactly(HEAD.size), 30)  # whatever is answered
    assert served.service.coming.num_bytes == 0
    writer.close()


def test_a_slow_peer_is_given_up_only_when_too_little_moves() -> None:
    unsent_answers = PendingBytes(1000)
    unsent_answers.note("a", 999)
    peer = SlowPeer(999, 100.0)
    assert not peer.is_given_up(999, unsent_answers, 100.0 + SLOW_PEER_S - 0.1)
    assert peer.is_given_up(999, unsent_answers, 100.0 + SLOW_PEER_S)
    peer = SlowPeer(999, 100.0)
    peer.written(int(LEAST_BYTES_S * SLOW_PEER_S))
    assert not peer.is_given_up(999, unsent_answers, 100.0 + SLOW_PEER_S)
    unsent_answers.note("b", 1)
    assert unsent_answers.room_bytes == 0
    assert not SlowPeer(1, 100.0).is_given_up(1, unsent_answers, 100.0)
    assert SlowPeer(1, 100.0).is_given_up(1, unsent_answers, 100.0 + PRESSED_S)
    unsent_answers.note("a", 0)
    assert unsent_answers.num_bytes == 1
    unsent_answers.check()


def test_the_least_rate_is_judged_by_windows() -> None:
    rate = LeastRate(10.0, 0.0)
    assert not rate.is_too_slow(0, 9.9)
    assert not rate.is_too_slow(10 * LEAST_BYTES_S, 10.0)
    assert not rate.is_too_slow(10 * LEAST_BYTES_S, 19.0)
    assert rate.is_too_slow(20 * LEAST_BYTES_S - 1, 20.0)


async def test_a_call_whose_connection_is_lost_at_once_leaves_nothing(served: Served) -> None:
    protocol = fast_server.FastServerProtocol(served.service, Peer(None, False, "test"))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        protocol.connection_made(Mock(asyncio.Transport, get_extra_info=lambda _: None))
        protocol.data_received(request_of(SLOW, 1))
        protocol.connection_lost(None)
        await until(lambda: not protocol._tasks)
        gc.collect()
    assert not warned, "the answer was never awaited"
    assert not served.waiting
