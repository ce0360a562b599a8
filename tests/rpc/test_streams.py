"""Calls that are answered by many messages, and whose callers send on."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tanghulu.errors import InvalidRequest, NodeUnavailable, Overloaded, TanghuluError
from tanghulu.rpc import sockets
from tanghulu.rpc.fast_aio import AsyncFastConnection
from tanghulu.rpc.fast_client import Reply
from tanghulu.rpc.fast_server import NO_ANSWER, AnswerStream, Later, Peer
from tanghulu.rpc.frames import MAX_BODY_BYTES
from tanghulu.rpc.methods import Method
from tests.rpc.service import ECHO, READABLE, Answer, Ask, Served, until

TALK = Method(50, "talk", Ask, Answer, READABLE)


class Talk:
    """A stream of TALK: what each end has heard, and how often the server was told that there is room."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.asked: list[str] = []
        self.heard: list[Reply[Answer] | TanghuluError] = []
        self.num_rooms = 0
        self.stream = AnswerStream(self._room)
        self.connection: AsyncFastConnection
        self.call_id = 0
        served.service.register(TALK, self._receive)

    def _room(self) -> None:
        self.num_rooms += 1

    def _receive(self, peer: Peer, request: Ask, attachment: memoryview) -> AnswerStream | Later:
        first = not self.asked
        self.asked += request.keys
        if "broken" in request.keys:
            raise InvalidRequest("not so")
        return self.stream if first else NO_ANSWER

    async def begin(self) -> None:
        self.connection = await AsyncFastConnection.connect(self.served.fast_port.address)
        first = Ask(keys=["first"])
        self.call_id = self.connection.stream(TALK.number, first, Answer, self.heard.append)
        await until(lambda: bool(self.asked))

    def send_on(self, *keys: str, most_unsent_bytes: int = 1 << 20) -> None:
        self.connection.send_on(self.call_id, TALK.number, Ask(keys), most_unsent_bytes)

    def names(self) -> list[str]:
        return [name for each in self.heard if isinstance(each, Reply) for name in each.message.node_ids]

    def error(self) -> Any:
        return next((each for each in self.heard if isinstance(each, TanghuluError)), None)


@pytest.fixture
async def talk(served: Served) -> AsyncIterator[Talk]:
    made = Talk(served)
    await made.begin()
    yield made
    await made.connection.close()


async def test_both_ends_send_on(talk: Talk) -> None:
    for number in range(3):
        talk.stream.send(Answer(node_ids=[f"n{number}"]))
        talk.send_on(f"k{number}")
    await until(lambda: len(talk.heard) == 3 and len(talk.asked) == 4)
    assert (talk.names(), talk.asked) == (["n0", "n1", "n2"], ["first", "k0", "k1", "k2"])
    request = Ask(keys=["k"])
    assert (await talk.connection.call(ECHO, request, Answer)).message.node_ids == ["k"], "beside other calls"


async def test_what_was_sent_arrives_before_the_end(talk: Talk) -> None:
    talk.stream.send(Answer(node_ids=["last"]))
    talk.stream.end()
    talk.stream.send(Answer(node_ids=["too late"]))
    talk.stream.end()
    await until(lambda: talk.error() is not None)
    assert talk.names() == ["last"]
    assert isinstance(talk.error(), NodeUnavailable)
    talk.send_on("nobody hears it")


async def test_an_error_is_told_to_the_stream(talk: Talk) -> None:
    talk.send_on("broken")
    await until(lambda: talk.error() is not None)
    assert isinstance(talk.error(), InvalidRequest)


async def test_a_peer_that_does_not_read_leaves_no_room_and_one_that_reads_again_does(talk: Talk) -> None:
    talk.connection.pause_reading()
    piece, num_sent = Answer(node_ids=["x" * 100_000]), 0
    while talk.stream.has_room:
        talk.stream.send(piece)
        num_sent += 1
        await asyncio.sleep(0)
    assert not talk.num_rooms
    talk.connection.resume_reading()
    await until(lambda: talk.num_rooms > 0 and len(talk.heard) == num_sent)
    assert talk.stream.has_room


async def test_what_waits_for_a_peer_is_bounded(talk: Talk) -> None:
    num_sent = 1

    def send_for_ever() -> None:
        nonlocal num_sent
        while True:  # the server, in the same loop, reads nothing meanwhile
            talk.send_on("x" * 10_000, most_unsent_bytes=50_000)
            num_sent += 1

    with pytest.raises(Overloaded, match="unsent"):
        send_for_ever()
    await until(lambda: len(talk.asked) == num_sent)
    talk.send_on("again", most_unsent_bytes=50_000)
    await until(lambda: talk.asked[-1] == "again")


async def test_messages_that_no_frame_holds_are_refused_to_who_sends_them(talk: Talk) -> None:
    with pytest.raises(InvalidRequest, match="exceeds"):
        talk.stream.send(Answer(node_ids=["x" * MAX_BODY_BYTES]))
    with pytest.raises(InvalidRequest, match="exceeds"):
        talk.send_on("x" * MAX_BODY_BYTES, most_unsent_bytes=1 << 30)
    talk.send_on("it goes on")
    await until(lambda: talk.asked[-1] == "it goes on")


async def test_the_kernel_looks_whether_a_silent_peer_is_there(talk: Talk) -> None:
    """At both ends: neither waits for an answer with a deadline. Who called goes elsewhere, so it asks more often."""
    ends = [talk.connection._transport, *talk.served.fast_port._transports]
    assert len(ends) == 2
    for transport, dead_s in zip(ends, (sockets.SILENT_HOST_S, sockets.DEAD_PEER_S), strict=True):
        assert transport is not None
        sock = transport.get_extra_info("socket")
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == dead_s * 1000
