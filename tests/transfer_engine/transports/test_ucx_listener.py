"""The owner's listener of ucx and its wire, with agents that move nothing: runs where NIXL is not installed, too."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tanghulu.errors import LeaseExpired, NodeUnavailable, Overloaded, TransferFailed, Unauthorized
from tanghulu.transfer_engine.core.access import AccessTable, Freed
from tanghulu.transfer_engine.core.config import ListenOptions
from tanghulu.transfer_engine.core.segment import Endpoint, MemorySegment, SegmentDescriptor
from tanghulu.transfer_engine.core.slices import Opcode
from tanghulu.transfer_engine.core.wire import Head, MalformedMessage, name_hash, secret_numbers
from tanghulu.transfer_engine.engine import TransferEngine
from tanghulu.transfer_engine.server import SegmentServer
from tanghulu.transfer_engine.transports.onesided.wire import (
    MAX_CONNECT_BYTES,
    REQUEST_BYTES,
    ControlAnswer,
    ControlOp,
    ControlRequest,
)
from tanghulu.transfer_engine.transports.ucx import agent as ucx_agent
from tanghulu.transfer_engine.transports.ucx.agent import UCX, pack_granted, parse_granted
from tanghulu.types import Address
from tests.virtual.clock import ManualClock

U64 = st.integers(0, (1 << 64) - 1)


class StillAgent:
    """An agent that can be made and closed; making one waits for ``may_make``."""

    made: list[StillAgent]
    may_make: threading.Event
    fails = False

    def __init__(self, name: str, *, serves: bool) -> None:
        assert serves
        assert self.may_make.wait(30)
        if self.fails:
            raise NodeUnavailable("no lanes")
        self.name = name
        self.closed = False
        self.made.append(self)

    def offer(self, address: int, num_bytes: int) -> bytes:
        return f"{self.name} {num_bytes}".encode()

    def close(self) -> None:
        self.closed = True


class Client:
    """Says exactly what it is told."""

    def __init__(self, secret: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.secret = secret
        self._data = bytearray()

    def say(self, op: ControlOp, token: int, session_id: int = 7, name: str = "s", generation: int = 3) -> None:
        secret = secret_numbers(self.secret) if op is ControlOp.CONNECT else (0, 0)
        self._writer.write(
            UCX.pack_request(ControlRequest(op, token, session_id, generation, name_hash(name), *secret))
        )

    def say_bytes(self, data: bytes) -> None:
        self._writer.write(data)

    async def answer(self) -> ControlAnswer | None:
        """None when the owner hung up."""
        async with asyncio.timeout(30):
            while (answer := UCX.take_answer(self._data)) is None:
                try:
                    data = await self._reader.read(4096)
                except ConnectionResetError:
                    return None
                if not data:
                    return None
                self._data += data
            return answer

    async def ask(self, op: ControlOp, token: int, **more: int | str) -> ControlAnswer:
        self.say(op, token, **more)  # type: ignore[arg-type]
        answer = await self.answer()
        assert answer is not None
        return answer

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionResetError):
            await self._writer.wait_closed()


LISTEN = ListenOptions(transports=("ucx", "tcp"), host="127.0.0.1")


class Bench:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.access = AccessTable(self.clock, lease_ms=1000, max_quarantined_bytes_per_session=0)
        self.secret = self.access.open_session(7, None).secret
        self.segment = MemorySegment.create("s", 1 << 16)
        self.freed: list[Freed] = []
        self.server = SegmentServer(
            self.segment, self.access, generation=3, host_id="h", listen=LISTEN, on_freed=self.freed.extend
        )
        self.clients: list[Client] = []

    async def client(self) -> Client:
        where = Address.parse(self.server.descriptor().endpoints_of("ucx")[0].address)
        self.clients.append(Client(self.secret, *await asyncio.open_connection(where.host, where.port)))
        return self.clients[-1]


@pytest.fixture
async def bench(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    StillAgent.made, StillAgent.may_make, StillAgent.fails = [], threading.Event(), False
    StillAgent.may_make.set()
    monkeypatch.setattr(ucx_agent, "Agent", StillAgent)
    monkeypatch.setattr(ucx_agent, "probe", lambda: "")
    bench = Bench()
    server = bench.server
    await server.start()
    yield bench
    server.check()
    for client in bench.clients:
        await client.close()
    await server.close()
    assert all(agent.closed for agent in StillAgent.made)
    bench.segment.close()


async def test_connect_close_and_what_is_refused(bench: Bench):
    client = await bench.client()
    answer = await client.ask(ControlOp.CONNECT, 5)
    address, metadata = parse_granted(answer.payload)
    assert (address, metadata) == (bench.segment.address, b"owner-5 65536")
    assert answer.leased
    assert not StillAgent.made[0].closed
    assert (await client.ask(ControlOp.CLOSE, 5)).refusal is None
    assert StillAgent.made[0].closed  # before it was answered
    wrong = [{"generation": 4}, {"name": "other"}, {"session_id": 8}]
    for number, each in enumerate(wrong):
        refusal = (await (await bench.client()).ask(ControlOp.CONNECT, 50 + number, **each)).refusal
        assert refusal is not None
    guesser = await bench.client()
    guesser.secret = bytes(16)
    assert isinstance((await guesser.ask(ControlOp.CONNECT, 60)).refusal, Unauthorized)
    bench.server.check()


async def test_a_fence_closes_the_agent_first_and_keeps_late_ones_out(bench: Bench):
    old, new, late = await bench.client(), await bench.client(), await bench.client()
    await old.ask(ControlOp.CONNECT, 1)
    await new.ask(ControlOp.CONNECT, 2)
    await new.ask(ControlOp.FENCE, 1)
    assert StillAgent.made[0].closed
    assert await old.answer() is None
    await new.ask(ControlOp.FENCE, 9)
    assert isinstance((await late.ask(ControlOp.CONNECT, 9)).refusal, Unauthorized)
    assert len(StillAgent.made) == 2


async def test_requests_behind_a_connect_wait_for_its_agent(bench: Bench):
    StillAgent.may_make.clear()
    client = await bench.client()
    client.say(ControlOp.CONNECT, 1)
    client.say(ControlOp.FENCE, 77)
    StillAgent.may_make.set()
    answers = [await client.answer(), await client.answer()]
    assert [each.op for each in answers if each] == [ControlOp.CONNECT, ControlOp.FENCE]


async def test_a_fence_while_the_agent_is_being_made(bench: Bench):
    StillAgent.may_make.clear()
    old, new = await bench.client(), await bench.client()
    old.say(ControlOp.CONNECT, 1)
    StillAgent.may_make.set()
    await new.ask(ControlOp.CONNECT, 2)
    await new.ask(ControlOp.FENCE, 1)
    while await old.answer() is not None:
        pass
    assert len([agent for agent in StillAgent.made if not agent.closed]) == 1


async def test_an_agent_that_cannot_be_made(bench: Bench):
    StillAgent.fails = True
    refusal = (await (await bench.client()).ask(ControlOp.CONNECT, 1)).refusal
    assert isinstance(refusal, NodeUnavailable)
    assert refusal.message == "no lanes"


async def test_leases(bench: Bench):
    lease = bench.access.grant(7, 0, 100, Opcode.WRITE)
    client = await bench.client()
    await client.ask(ControlOp.CONNECT, 1)
    assert (await client.ask(ControlOp.ADMIT, lease)).refusal is None
    assert isinstance((await client.ask(ControlOp.ADMIT, lease + 1)).refusal, LeaseExpired)
    bench.clock.advance(2.0)
    assert bench.access.expire(bench.clock.now_s()) == []  # its agent lives
    assert await client.answer() is None  # hung up on
    assert StillAgent.made[0].closed
    assert [each.lease_id for each in bench.freed] == [lease]
    assert not bench.access.busy(0, 100)


async def test_a_client_is_not_served_until_it_takes_its_answers(bench: Bench):
    client, num_requests = await bench.client(), 10_000
    await client.ask(ControlOp.CONNECT, 1)
    (connection,) = bench.server.admission.connections
    transport = connection._transport  # type: ignore[attr-defined]
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

    async def say_and_do_not_listen() -> None:
        for _ in range(num_requests):
            client.say(ControlOp.ADMIT, 99)
        async with asyncio.timeout(30):
            while connection.progress is None:  # noqa: ASYNC110 - nothing signals it
                await asyncio.sleep(0.01)
        assert not transport.is_reading()
        assert transport.get_write_buffer_size() < 100_000

    await say_and_do_not_listen()
    bench.server.admission.cut_stalled()
    for _ in range(num_requests):
        assert await client.answer() is not None
    await say_and_do_not_listen()
    bench.server.admission.cut_stalled()
    assert not transport.is_closing()  # it has taken answers since the last time
    bench.server.admission.cut_stalled()
    assert transport.is_closing()


async def test_others_have_a_turn_between_two_digests(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    lease, turn, together = bench.access.grant(7, 0, 100, Opcode.READ), [0], []

    def digest(head: Head) -> int:
        together.append(turn[0])
        turn[0] += 1
        asyncio.get_running_loop().call_soon(turn.clear)
        asyncio.get_running_loop().call_soon(turn.append, 0)
        return 5

    monkeypatch.setattr(bench.server.admission, "digest", digest)
    client = await bench.client()
    await client.ask(ControlOp.CONNECT, 1)
    request = ControlRequest(ControlOp.READ, lease, length=100)
    client.say_bytes(UCX.pack_request(request) * 300)
    assert [answer.digest for _ in range(300) if (answer := await client.answer())] == [5] * 300
    assert not any(together)


async def test_agents_are_bounded(bench: Bench):
    bench.server._listeners["ucx"].ends.max_ends = 1
    first, second = await bench.client(), await bench.client()
    await first.ask(ControlOp.CONNECT, 1)
    assert isinstance((await second.ask(ControlOp.CONNECT, 2)).refusal, Overloaded)
    await second.close()


@pytest.mark.parametrize("said", [b"\0" * REQUEST_BYTES, UCX.pack_request(ControlRequest(ControlOp.CLOSE, 5)),
                                  UCX.pack_request(ControlRequest(ControlOp.CONNECT, 0)),
                                  UCX.pack_request(ControlRequest(ControlOp.CONNECT, 5, payload=b"?"))])  # fmt: skip
async def test_malformed_requests_close_the_connection(bench: Bench, said: bytes):
    client = await bench.client()
    client.say_bytes(said)
    assert await client.answer() is None


async def test_without_nixl(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ucx_agent, "_MODULES", ("tanghulu.nowhere",))
    monkeypatch.setattr(ucx_agent, "_bindings", [])
    assert "pip install" in ucx_agent.probe()
    segment = MemorySegment.create("s", 100)
    server = SegmentServer(segment, None, generation=1, host_id="h", listen=LISTEN)
    with pytest.raises(NodeUnavailable, match="NIXL cannot be imported"):
        await server.start()
    segment.close()
    there = SegmentDescriptor("s", 100, "h", 1, (Endpoint("ucx", "127.0.0.1:9"),))
    with TransferEngine(host_id="h") as engine, pytest.raises(NodeUnavailable, match="NIXL cannot be imported"):
        engine.open_segment(there)


@given(op=st.sampled_from(list(ControlOp)), numbers=st.lists(U64, min_size=6, max_size=6),
       payload=st.binary(max_size=MAX_CONNECT_BYTES), cut=st.integers(1, 20))  # fmt: skip
def test_requests_survive_the_wire(op: ControlOp, numbers: list[int], payload: bytes, cut: int):
    request = ControlRequest(op, *numbers, payload=payload)  # type: ignore[misc]
    data = bytearray(UCX.pack_request(request))
    assert UCX.take_request(data[:-cut]) is None
    data += UCX.pack_request(ControlRequest(ControlOp.FENCE, 1))
    assert UCX.take_request(data) == request
    assert UCX.take_request(data) == ControlRequest(ControlOp.FENCE, 1)
    assert not data


@given(metadata=st.binary(max_size=300), address=U64, leased=st.booleans(), digest=U64, cut=st.integers(1, 20))
def test_answers_survive_the_wire(metadata: bytes, address: int, leased: bool, digest: int, cut: int):
    answer = ControlAnswer(ControlOp.CONNECT, None, pack_granted(address, metadata), digest, leased)
    data = bytearray(UCX.pack_answer(answer))
    assert UCX.take_answer(data[:-cut]) is None
    data += UCX.pack_answer(ControlAnswer(ControlOp.CLOSE, TransferFailed("no")))
    assert UCX.take_answer(data) == answer
    assert parse_granted(answer.payload) == (address, metadata)
    refused = UCX.take_answer(data)
    assert refused is not None
    assert isinstance(refused.refusal, TransferFailed)
    assert not data


@given(data=st.binary(min_size=REQUEST_BYTES, max_size=REQUEST_BYTES))
def test_noise_is_malformed(data: bytes):
    with pytest.raises(MalformedMessage):
        UCX.take_request(bytearray(data))
    with pytest.raises(MalformedMessage):
        UCX.take_answer(bytearray(data))
