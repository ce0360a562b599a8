"""A peer of another version of a protocol: both ends name both versions, at once, whatever else has changed."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path as FilePath
from typing import Any, cast

import pytest

from tanghulu.errors import NodeUnavailable, VersionMismatch, error_from_code
from tanghulu.runtime.clock import SystemClock
from tanghulu.transfer_engine.core import wire
from tanghulu.transfer_engine.core.admission import PeerAdmission
from tanghulu.transfer_engine.core.config import ListenOptions, ServerLimits
from tanghulu.transfer_engine.core.paths import Path
from tanghulu.transfer_engine.core.segment import NO_SESSION, Endpoint, MemorySegment, SegmentDescriptor
from tanghulu.transfer_engine.core.transport import ConnectContext, ServeContext
from tanghulu.transfer_engine.core.wire import Head, MalformedMessage, Op, pack_shm_hello, parse_head
from tanghulu.transfer_engine.engine import EngineConfig, TransferEngine
from tanghulu.transfer_engine.server import SegmentServer
from tanghulu.transfer_engine.transports.onesided.connection import StagedSlots
from tanghulu.transfer_engine.transports.onesided.link import Movers, OneSidedLink
from tanghulu.transfer_engine.transports.onesided.listener import OneSidedListener, OneSidedServerConnection
from tanghulu.transfer_engine.transports.onesided.wire import ANSWER_BYTES, ControlAnswer, ControlOp, ControlRequest
from tanghulu.transfer_engine.transports.rdma.mover import RdmaMover
from tanghulu.transfer_engine.transports.rdma.transport import RdmaEnds
from tanghulu.transfer_engine.transports.rdma.wire import RDMA, QueuePairAddress, pack_connect
from tanghulu.transfer_engine.transports.ucx import agent as ucx_agent
from tanghulu.transfer_engine.transports.ucx import transport as ucx_transport
from tanghulu.transfer_engine.transports.ucx.agent import UCX
from tanghulu.transfer_engine.transports.ucx.transport import UcxMovers
from tanghulu.types import Address

SEGMENT = "s"
VERSION_AT = 4
NO_ADDRESS = QueuePairAddress("::", 0, 0, 0, 0)
CONNECT = ControlRequest(ControlOp.CONNECT, 77, 0, 3, wire.name_hash(SEGMENT))
HELLOS = {
    "tcp": Head(Op.HELLO, 0, 0, wire.name_hash(SEGMENT), 3, 77, 0).pack(),
    "shm": pack_shm_hello(SEGMENT, 3, NO_SESSION),
    "rdma": RDMA.pack_request(CONNECT._replace(payload=pack_connect("mlx5_0", NO_ADDRESS))),
    "ucx": UCX.pack_request(CONNECT),
}
ANSWERS = {
    "tcp": wire.pack_reply(0, 0),
    "shm": wire.pack_shm_answer(1 << 16, 0),
    "rdma": RDMA.pack_answer(ControlAnswer(ControlOp.CONNECT)),
    "ucx": UCX.pack_answer(ControlAnswer(ControlOp.CONNECT)),
}
VERSIONS = {"tcp": wire.VERSION, "shm": wire.VERSION, "rdma": RDMA.version, "ucx": UCX.version}
#: Bytes of an answer of ours in front of a refusal's text.
HEADS = {"tcp": wire.REPLY_BYTES, "shm": wire.SHM_ANSWER_BYTES, "rdma": ANSWER_BYTES, "ucx": ANSWER_BYTES}


def of_version(message: bytes, version: int) -> bytes:
    return message[:VERSION_AT] + bytes([version]) + message[VERSION_AT + 1 :]


def names(text: str, client: int, owner: int) -> bool:
    return bool(re.search(rf"client speaks version {client} of .*, the segment's owner version {owner};", text))


# --- owners, who are greeted by another version


class Owner:
    """A real server with the ports that it can have here, and rdma's without a device."""

    def __init__(self, folder: FilePath) -> None:
        self.segment = MemorySegment.create(SEGMENT, 1 << 16)
        listen = ListenOptions(transports=("shm", "ucx", "tcp"), host="127.0.0.1", unix_path=str(folder / "listener"))
        self.server = SegmentServer(
            self.segment, None, generation=3, host_id="h", listen=listen, limits=ServerLimits(stall_timeout_s=0.05)
        )
        self._rdma: asyncio.Server | None = None

    async def start(self) -> None:
        await self.server.start()
        listener = OneSidedListener(
            RdmaEnds(self.segment, ()),
            ServeContext(
                segment=self.segment, access=None, generation=3, admission=self.reception, limits=ServerLimits(),
                listen=ListenOptions(host="127.0.0.1"), on_freed=lambda freed: None, on_hang_up=lambda _: None,
                watch_process=lambda *_: None,
            ),
        )  # fmt: skip
        loop = asyncio.get_running_loop()
        self._rdma = await loop.create_server(lambda: OneSidedServerConnection(listener), "127.0.0.1", 0)

    @property
    def reception(self) -> PeerAdmission:
        return self.server.admission

    async def knock(self, transport: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if transport == "rdma":
            assert self._rdma is not None
            return await asyncio.open_connection(*self._rdma.sockets[0].getsockname())
        address = self.server.descriptor().endpoints_of(transport)[0].address
        if transport == "shm":
            return await asyncio.open_unix_connection(address)
        where = Address.parse(address)
        return await asyncio.open_connection(where.host, where.port)

    async def close(self) -> None:
        assert self._rdma is not None
        self._rdma.close()
        await self.server.close()
        self.server.check()
        self.segment.close()


@pytest.fixture
async def ports(tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Owner]:
    monkeypatch.setattr(ucx_agent, "probe", lambda: "")
    ports = Owner(tmp_path)
    await ports.start()
    yield ports
    await ports.close()


@pytest.mark.parametrize("transport", HELLOS)
@pytest.mark.parametrize("length", [5, 11, 4096])
async def test_an_owner_says_which_versions_meet(ports: Owner, transport: str, length: int):
    """Also one whose hello is shorter or longer than ours, and who says more before it has heard the answer."""
    ours = VERSIONS[transport]
    reader, writer = await ports.knock(transport)
    writer.write(of_version(HELLOS[transport], ours + 3).ljust(length, b"\x01")[:length])
    async with asyncio.timeout(30):
        answer = await reader.read()  # to its end
    assert answer[VERSION_AT] == ours
    code, _, text = answer[HEADS[transport] :].decode().partition("\0")
    error = error_from_code(code, text)
    assert isinstance(error, VersionMismatch)
    assert names(text, ours + 3, ours)
    writer.write(b"more" * 100)
    writer.close()
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        await writer.wait_closed()


@pytest.mark.parametrize("transport", ["tcp", "rdma", "ucx"])
async def test_who_does_not_hang_up_is_hung_up_on(ports: Owner, transport: str, monkeypatch: pytest.MonkeyPatch):
    gone, forget = asyncio.Event(), ports.reception.closed

    def closed(connection: Any) -> None:
        forget(connection)
        gone.set()

    monkeypatch.setattr(ports.reception, "closed", closed)
    reader, writer = await ports.knock(transport)
    writer.write(of_version(HELLOS[transport], 99))
    async with asyncio.timeout(30):
        await reader.read()
        await gone.wait()
    assert not ports.reception.connections
    writer.close()
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        await writer.wait_closed()


@pytest.mark.parametrize("transport", ["tcp", "ucx"])
async def test_a_version_that_changes_on_the_way_is_nonsense(ports: Owner, transport: str, monkeypatch: Any):
    monkeypatch.setattr(ucx_agent, "Agent", lambda name, serves: StillAgent())
    reader, writer = await ports.knock(transport)
    writer.write(HELLOS[transport])
    async with asyncio.timeout(30):
        await reader.readexactly(HEADS[transport])
        writer.write(of_version(HELLOS[transport], 99))
        with contextlib.suppress(ConnectionResetError):
            assert b"VERSION" not in await reader.read()
    writer.close()
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        await writer.wait_closed()


class StillAgent:
    """UCX's part, which these tests do not need."""

    closed = False

    def register(self, address: int, num_bytes: int) -> StillAgent:
        return self

    def offer(self, address: int, num_bytes: int) -> bytes:
        return b""

    def close(self) -> None:
        self.closed = True


# --- clients, who are answered by another version


@contextlib.contextmanager
def foreign_owner(transport: str, folder: FilePath, answer: bytes) -> Iterator[SegmentDescriptor]:
    """Takes what clients say and answers each with ``answer``; keeps their connections open."""
    if transport == "shm":
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(folder / "listener"))
        listener.listen()
        address = str(folder / "listener")
    else:
        listener = socket.create_server(("127.0.0.1", 0))
        address = str(Address(*listener.getsockname()))

    def serve() -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            while True:
                client = stack.enter_context(listener.accept()[0])
                client.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield SegmentDescriptor(SEGMENT, 1 << 16, "h", 3, (Endpoint(transport, address, "mlx5_0"),))
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(30)
        listener.close()


def foreign_answers(transport: str) -> list[bytes]:
    whole = of_version(ANSWERS[transport], VERSIONS[transport] + 1)
    return [whole, whole[:5], whole[:-1], whole + b"and more of it" * 10]


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("kind", range(4))
def test_opening_a_segment_says_which_versions_meet(transport: str, kind: int, tmp_path: FilePath):
    answer = foreign_answers(transport)[kind]
    with foreign_owner(transport, tmp_path, answer) as descriptor, TransferEngine(host_id="h") as engine:
        with pytest.raises(VersionMismatch) as caught:
            engine.open_segment(descriptor)
        ours = VERSIONS[transport]
        assert names(caught.value.message, ours, ours + 1)
        assert isinstance(caught.value, NodeUnavailable)  # as which those take it who only ask whether to go elsewhere


def test_another_transport_serves_where_its_version_is_ours(tmp_path: FilePath):
    config = EngineConfig(connect_timeout_s=1)
    with (
        foreign_owner("shm", tmp_path, foreign_answers("shm")[0]) as of_shm,
        foreign_owner("tcp", tmp_path, ANSWERS["tcp"]) as of_tcp,
        TransferEngine(host_id="h", config=config) as engine,
    ):
        both = SegmentDescriptor(SEGMENT, 1 << 16, "h", 3, of_shm.endpoints + of_tcp.endpoints)
        assert engine.open_segment(both).transport == "tcp"


class StillDevices:
    """Verbs' part: a queue pair that is never connected."""

    address = NO_ADDRESS
    slots = StagedSlots(1)

    def device(self, name: str) -> StillDevices:
        return self

    def queue_pair(self, num_works: int) -> StillDevices:
        return self

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        pass


class RdmaMovers:
    dialect = RDMA

    def make(self, path: Path, token: int, wake: Callable[[], None]) -> RdmaMover:
        return RdmaMover(cast(Any, StillDevices()), "mlx5_0", path.endpoint.device, cast(Any, StillDevices()), wake)

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("transport", "movers"), [("rdma", RdmaMovers), ("ucx", UcxMovers)])
@pytest.mark.parametrize("kind", range(4))
def test_connecting_says_which_versions_meet(
    transport: str, movers: Callable[[], Movers], kind: int, tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ucx_transport, "Agent", lambda name, serves: StillAgent())
    with foreign_owner(transport, tmp_path, foreign_answers(transport)[kind]) as descriptor:
        link = OneSidedLink(ConnectContext(descriptor, NO_SESSION, EngineConfig()), movers())
        with pytest.raises(VersionMismatch) as caught:
            link.greet(Path(descriptor.endpoints[0], "", 0, 0), 5, SystemClock())
        link.close()
        assert names(caught.value.message, VERSIONS[transport], VERSIONS[transport] + 1)


def test_the_first_five_bytes_of_every_message_are_magic_and_version():
    """What every version has in common; nothing here may change."""
    for transport in HELLOS:
        for message in (HELLOS[transport], ANSWERS[transport]):
            magic, version = struct.unpack_from("<IB", message)
            assert magic & 0xFFFFFF00 == 0x7A6E6700
            assert version == VERSIONS[transport]


@pytest.mark.parametrize("verified", [False, True])
def test_a_head_says_whether_it_is_verified(verified: bool) -> None:
    head = Head(Op.READ, 1, 2, 3, 4, 5, 6, verified, 7)
    assert parse_head(head.pack()) == head


@pytest.mark.parametrize("flags", [2, 4])
def test_flags_that_nobody_knows_are_malformed(flags: int) -> None:
    packed = bytearray(Head(Op.READ, 1, 2, 3, 4, 5, 6).pack())
    packed[6] = flags
    with pytest.raises(MalformedMessage):
        parse_head(packed)
