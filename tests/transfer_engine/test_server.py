"""The owner's side by itself: bytes on the wire, the listener, bounds and stalls; on both event loops."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tanghulu.errors import InvalidRequest, LeaseExpired, TanghuluError
from tanghulu.rpc.sockets import unpace_within_machine
from tanghulu.rpc.wire import encode, parser_of
from tanghulu.transfer_engine.core import admission, wire
from tanghulu.transfer_engine.core.config import ListenOptions, ServerLimits
from tanghulu.transfer_engine.core.paths import Path as TransferPath
from tanghulu.transfer_engine.core.segment import Endpoint, MemorySegment, SegmentDescriptor
from tanghulu.transfer_engine.core.wire import Head, MalformedMessage, Op
from tanghulu.transfer_engine.engine import Opcode, TransferEngine, TransferRequest
from tanghulu.transfer_engine.server import SegmentServer
from tanghulu.transfer_engine.transports.tcp.sockets import KernelNetwork
from tanghulu.types import Address
from tests.transfer_engine.segment_process import HOST_ID, SegmentProcess, random_bytes

TOKEN = 77


def hello(token: int = TOKEN, name: str = "s", generation: int = 3) -> bytes:
    return Head(Op.HELLO, 0, 0, wire.name_hash(name), generation, token, 0).pack()


class Peer:
    """A client that says exactly what it is told."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def reply(self) -> tuple[int, bytes | TanghuluError]:
        refused, slice_id, num_bytes, _ = wire.parse_reply(await self.reader.readexactly(wire.REPLY_BYTES))
        data = await self.reader.readexactly(num_bytes)
        return slice_id, wire.parse_error(data) if refused else data

    async def gone(self) -> bool:
        try:
            return await self.reader.read(1) == b""
        except ConnectionResetError:
            return True

    def say(self, *data: bytes) -> None:
        self.writer.write(b"".join(data))

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionResetError):
            await self.writer.wait_closed()


class Bench:
    def __init__(self, server: SegmentServer, segment: MemorySegment) -> None:
        self.server, self.segment = server, segment
        self.peers: list[Peer] = []

    async def peer(self) -> Peer:
        host, _, port = self.server.descriptor().endpoints_of("tcp")[0].address.rpartition(":")
        self.peers.append(Peer(*await asyncio.open_connection(host, int(port))))
        return self.peers[-1]


@pytest.fixture
async def bench(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    segment = MemorySegment.create("s", 1 << 20)
    listen = ListenOptions(transports=("shm", "tcp"), host="127.0.0.1", unix_path=str(tmp_path / "listener"))
    limits = ServerLimits(max_connections=3, **getattr(request, "param", {}))
    server = SegmentServer(segment, None, generation=3, host_id="h", listen=listen, limits=limits)
    await server.start()
    bench = Bench(server, segment)
    yield bench
    for peer in bench.peers:
        await peer.close()
    await server.close()
    server.check()
    segment.close()
    assert not (tmp_path / "listener").exists()


async def test_refused_requests_keep_the_connection(bench: Bench):
    peer = await bench.peer()
    peer.say(hello())
    assert await peer.reply() == (0, b"")
    peer.say(Head(Op.WRITE, 5, 0, 0, 3, (1 << 20) - 3, 600_000).pack(), b"x" * 600_000)
    peer.say(Head(Op.READ, 6, 0, 0, 2, 0, 10).pack(), Head(Op.WRITE, 7, 0, 0, 3, 8, 4).pack(), b"fine")
    peer.say(Head(Op.READ, 8, 0, 0, 3, 8, 4).pack())
    answers = [await peer.reply() for _ in range(4)]
    assert [slice_id for slice_id, _ in answers] == [5, 6, 7, 8]
    assert isinstance(answers[0][1], InvalidRequest)
    assert getattr(answers[1][1], "code", "") == "NODE_UNAVAILABLE"
    assert [answer for _, answer in answers[2:]] == [b"", b"fine"]
    assert bench.server.admission.num_refused == 2
    assert bench.server.bytes_written["tcp"] == bench.server.bytes_read["tcp"] == 4


@pytest.mark.parametrize(
    "said",
    [b"\0" * wire.HEAD_BYTES, b"GET / HTTP/1.1\r\n" * 10, hello() + Head(Op.READ, 1, 0, 0, 3, 0, 0).pack(),
     hello() + Head(Op.WRITE, 1, 0, 0, 3, 0, 1 << 41).pack(), Head(Op.READ, 1, 0, 0, 3, 0, 10).pack()],
)  # fmt: skip
async def test_a_malformed_head_closes_the_connection(bench: Bench, said: bytes):
    peer = await bench.peer()
    peer.say(said)
    while not await peer.gone():
        pass


@pytest.mark.parametrize("wrong", [hello(token=0), hello(name="t"), hello(generation=4)])
async def test_a_wrong_hello_is_refused(bench: Bench, wrong: bytes):
    peer = await bench.peer()
    peer.say(wrong)
    assert isinstance((await peer.reply())[1], TanghuluError)


async def test_a_fence_cuts_a_connection_now_and_later(bench: Bench):
    old, new, late = await bench.peer(), await bench.peer(), await bench.peer()
    old.say(hello(1), Head(Op.WRITE, 1, 0, 0, 3, 0, 1000).pack(), b"o" * 999)
    assert await old.reply() == (0, b"")
    new.say(hello(2), Head(Op.FENCE, 0, 0, 0, 3, 1, 0).pack(), Head(Op.FENCE, 0, 0, 0, 3, 9, 0).pack())
    assert [await new.reply() for _ in range(3)] == [(0, b"")] * 3
    assert await old.gone()
    late.say(hello(9), Head(Op.WRITE, 1, 0, 0, 3, 0, 4).pack(), b"late")
    assert isinstance((await late.reply())[1], TanghuluError)
    assert await late.gone()
    assert bytes(bench.segment.view[:4]) != b"late"


async def test_connections_are_bounded(bench: Bench):
    peers = [await bench.peer() for _ in range(4)]
    for peer in peers[:3]:
        peer.say(hello(100 + id(peer)))
        assert await peer.reply() == (0, b"")
    assert await peers[3].gone()
    bench.server.check()


@pytest.mark.parametrize("bench", [{"stall_timeout_s": 0.05}], indirect=True)
async def test_a_stall_inside_a_slice_is_cut_and_an_idle_connection_is_not(bench: Bench):
    idle, stalled = await bench.peer(), await bench.peer()
    idle.say(hello(1))
    assert await idle.reply() == (0, b"")
    stalled.say(hello(2), Head(Op.WRITE, 1, 0, 0, 3, 0, 1000).pack(), b"half")
    assert await stalled.reply() == (0, b"")
    assert await stalled.gone()
    idle.say(Head(Op.READ, 4, 0, 0, 3, 0, 4).pack())
    assert await idle.reply() == (4, b"half")


@pytest.mark.parametrize("bench", [{"stall_timeout_s": 0.05}], indirect=True)
async def test_a_stall_inside_a_head_is_cut_too(bench: Bench):
    stalled = await bench.peer()
    stalled.say(hello(2))
    assert await stalled.reply() == (0, b"")
    stalled.say(Head(Op.READ, 1, 0, 0, 3, 0, 1000).pack()[:-1])
    assert await stalled.gone()


@pytest.mark.parametrize("bench", [{"stall_timeout_s": 0.2}], indirect=True)
async def test_a_slice_that_drips_is_cut(bench: Bench):
    """A byte at every moment, and much less than the least rate."""
    peer = await bench.peer()
    peer.say(hello(1), Head(Op.WRITE, 1, 0, 0, 3, 0, 1 << 20).pack())
    assert await peer.reply() == (0, b"")
    gone = asyncio.create_task(peer.gone())
    while not gone.done():
        peer.say(b"x")
        await asyncio.sleep(0.01)
    assert gone.result()


async def test_a_peer_is_not_read_from_until_it_takes_its_replies(bench: Bench):
    peer, num_heads = await bench.peer(), 10_000
    peer.say(hello())
    assert await peer.reply() == (0, b"")
    (connection,) = bench.server.admission.connections
    transport = connection._transport  # type: ignore[attr-defined]
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

    async def say_and_do_not_listen() -> None:
        peer.say(*(Head(Op.READ, number, 0, 0, 2, 0, 10).pack() for number in range(num_heads)))
        async with asyncio.timeout(30):
            while not transport.get_write_buffer_size():  # noqa: ASYNC110 - nothing signals it
                await asyncio.sleep(0.01)
        assert not transport.is_reading()
        assert transport.get_write_buffer_size() < 1000  # one refusal

    await say_and_do_not_listen()
    assert [(await peer.reply())[0] for _ in range(num_heads)] == [*range(num_heads)]
    await say_and_do_not_listen()
    for _ in range(2):
        bench.server.admission.cut_stalled()
    assert transport.is_closing()


@pytest.mark.parametrize("bench", [{"hello_s": 0.1}], indirect=True)
async def test_a_hello_is_not_waited_for_for_ever(bench: Bench):
    silent, known = await bench.peer(), await bench.peer()
    silent.say(hello()[:-1])
    known.say(hello(2))
    assert await known.reply() == (0, b"")
    assert await silent.gone()
    known.say(Head(Op.READ, 4, 0, 0, 3, 0, 4).pack())
    assert await known.reply() == (4, bytes(4))


async def test_the_unknown_make_way_for_each_other(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(admission, "MAX_UNKNOWN", 1)
    silent = await bench.peer()
    silent.say(hello()[:-1])
    for token in (1, 2):
        peer = await bench.peer()
        peer.say(hello(token))
        assert await peer.reply() == (0, b"")
    assert await silent.gone()


async def test_the_listener_is_private(bench: Bench):
    path = bench.server.descriptor().endpoints_of("shm")[0].address
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


async def test_the_listener_s_bounds(bench: Bench):
    path = bench.server.descriptor().endpoints_of("shm")[0].address
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(b"nonsense" * 20)
    peer = Peer(reader, writer)
    bench.peers.append(peer)
    assert await peer.gone()


async def test_a_living_owner_s_listener_is_not_taken(bench: Bench):
    path = bench.server.descriptor().endpoints_of("shm")[0].address
    second = MemorySegment.create("s", 10)
    listen = ListenOptions(transports=("shm", "tcp"), host="127.0.0.1", unix_path=path)
    server = SegmentServer(second, None, generation=4, host_id="h", listen=listen)
    with pytest.raises(OSError):
        await server.start()
    await server.close()
    second.close()
    assert os.stat(path)


def test_plain_asyncio_serves_too(no_descriptor_leaks: None):
    with SegmentProcess(loop="asyncio") as owner, TransferEngine(host_id=HOST_ID) as engine:
        data, landing = random_bytes(20 << 20, 5), bytearray(20 << 20)
        for transport in ("shm", "tcp"):
            remote = engine.open_segment(owner.descriptor, transport=transport)
            engine.transfer([TransferRequest(Opcode.WRITE, data, remote, 1, 20 << 20)], 10)
            engine.transfer([TransferRequest(Opcode.READ, landing, remote, 1, 20 << 20)], 10)
            assert landing == data.tobytes()
        assert owner.counters()["written"] == owner.counters()["read"] == 20 << 20


def test_a_segment_is_sealed_and_leaves_nothing():
    segment = MemorySegment.create("sealed", 10_000, prefault=True)
    segment.check()
    assert segment.view.format == "B"
    with pytest.raises(OSError):
        os.ftruncate(segment.fd, 5)
    with pytest.raises(OSError):
        os.ftruncate(segment.fd, 20_000)
    kept = segment.view[5:10]
    segment.close()
    segment.close()
    segment.check()
    kept[0] = 1
    for name, size in (("", 1), ("x" * 256, 1), ("a\0b", 1), ("ok", 0)):
        with pytest.raises(InvalidRequest):
            MemorySegment.create(name, size)


def test_descriptors_survive_the_wire():
    descriptor = SegmentDescriptor("n", 1 << 40, "h", 9, (Endpoint("shm", "/x"), Endpoint("tcp", "a:1", "mlx5_0")))
    assert parser_of(SegmentDescriptor)(encode(descriptor)) == descriptor
    assert [each.device for each in descriptor.endpoints_of("tcp")] == ["mlx5_0"]


U64 = st.integers(0, (1 << 64) - 1)


@given(op=st.sampled_from([Op.HELLO, Op.FENCE]), numbers=st.lists(U64, min_size=6, max_size=6))
def test_heads_survive_the_wire(op: Op, numbers: list[int]):
    head = Head(op, *numbers)
    assert wire.parse_head(head.pack()) == head


@given(data=st.binary(min_size=wire.HEAD_BYTES, max_size=wire.HEAD_BYTES))
def test_noise_is_malformed(data: bytes):
    with pytest.raises(MalformedMessage):
        wire.parse_head(data)
    with pytest.raises(MalformedMessage):
        wire.parse_reply(data)


def test_errors_survive_the_wire():
    reply = wire.pack_refusal(9, LeaseExpired("läse " * 2000))
    refused, slice_id, num_bytes, _ = wire.parse_reply(reply)
    assert (refused, slice_id, num_bytes) == (True, 9, wire.MAX_TEXT_BYTES)
    error = wire.parse_error(reply[wire.REPLY_BYTES :])
    assert isinstance(error, LeaseExpired)
    assert error.message.startswith("läse läse")


def test_a_dead_owner_s_socket_file_is_replaced(tmp_path: Path):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "listener"))
    with SegmentProcess(folder=tmp_path) as owner, TransferEngine(host_id=HOST_ID) as engine:
        assert engine.open_segment(owner.descriptor).transport == "shm"


@pytest.mark.parametrize(("bound", "shared"), [("127.0.0.1", True), ("127.0.0.2", False)])
def test_only_what_stays_on_the_machine_is_not_paced(bound: str, shared: bool):
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as sock:
        usual = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        sock.bind((bound, 0))
        sock.connect(listener.getsockname())
        unpace_within_machine(sock, listener.getsockname())
        chosen = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        assert chosen == (b"reno".ljust(16, b"\0") if shared else usual)


async def test_the_owner_s_end_of_a_local_connection_is_not_paced(bench: Bench):
    peer = await bench.peer()
    peer.say(hello())
    assert await peer.reply() == (0, b"")
    (connection,) = bench.server.admission.connections
    sock = connection._transport.get_extra_info("socket")  # type: ignore[attr-defined]
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).startswith(b"reno\0")


def test_the_client_s_end_of_a_local_connection_is_not_paced(no_descriptor_leaks: None):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = Address(*listener.getsockname())
        sock = KernelNetwork().connect(TransferPath(Endpoint("tcp", str(address)), "", 0, 0), address)
        assert isinstance(sock, socket.socket)
        with sock:
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).startswith(b"reno\0")
