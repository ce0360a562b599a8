"""Checksums, notices and overlaps: what every transport does alike, beside a wire that changes a bit."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from tanghulu.errors import ChecksumMismatch, InvalidRequest, NodeUnavailable, Unauthorized
from tanghulu.transfer_engine.core import wire
from tanghulu.transfer_engine.core.paths import Capability, Path, PathTable, PauseRule
from tanghulu.transfer_engine.core.segment import Endpoint
from tanghulu.transfer_engine.engine import (
    EngineConfig,
    Opcode,
    RemoteSegment,
    TransferBatch,
    TransferEngine,
    TransferRequest,
)
from tanghulu.transfer_engine.transports.shm.transport import ShmPeer
from tanghulu.transfer_engine.transports.tcp import transport as tcp
from tests.contracts.transfer import SIZE, checksum
from tests.transfer_engine.segment_process import HOST_ID, SegmentProcess, random_bytes

READ, WRITE = Opcode.READ, Opcode.WRITE


class TestChangedBytes:
    """What shm and tcp do about them; ``test_onesided`` has the others."""

    @pytest.mark.parametrize("opcode", Opcode)
    @pytest.mark.parametrize("times", [1, 2])
    def test_a_changed_copy_is_made_once_more(
        self,
        engine: TransferEngine,
        owner: SegmentProcess,
        monkeypatch: pytest.MonkeyPatch,
        opcode: Opcode,
        times: int,
    ):
        remote = engine.open_segment(owner.descriptor, transport="shm")
        copy, left = ShmPeer.copy, [times]

        def flawed(self: ShmPeer, opcode: Opcode, local: Any, local_offset: int, remote_offset: int, length: int):
            copy(self, opcode, local, local_offset, remote_offset, length)
            if left[0]:
                left[0] -= 1
                assert self.writable_view is not None
                (local.array if opcode is READ else self.writable_view)[remote_offset + 7] ^= 4

        monkeypatch.setattr(ShmPeer, "copy", flawed)
        data = bytearray(os.urandom(1000))
        request = TransferRequest(opcode, data, remote, 0, 1000, verify=True)
        if times == 2:
            with pytest.raises(ChecksumMismatch):
                engine.transfer([request], 5)
        else:
            engine.transfer([request], 5)
            assert owner.peek(0, 1000) == data

    @pytest.mark.parametrize("opcode", Opcode)
    def test_a_wire_that_changes_a_bit(self, owner: SegmentProcess, opcode: Opcode):
        with changing_wire(owner.tcp_port, opcode) as port, TransferEngine(host_id="elsewhere") as engine:
            endpoint = Endpoint("tcp", f"127.0.0.1:{port}")
            remote = engine.open_segment(structs.replace(owner.descriptor, endpoints=(endpoint,)))
            owner.poke(0, os.urandom(1000))
            data = bytearray(os.urandom(1000))
            plain = TransferRequest(opcode, data, remote, 0, 1000)
            engine.transfer([plain], 5)
            assert owner.peek(0, 1000) != data  # nobody asked
            remote.close()
            remote = engine.open_segment(structs.replace(owner.descriptor, endpoints=(endpoint,)))
            handle = engine.submit(TransferBatch([replace(plain, target=remote, verify=True)]))
            assert handle.wait(30).ok, handle.story(0)
            assert owner.peek(0, 1000) == data
            assert [line.split()[3] for line in handle.story(0)] == ["post", "corrupt", "post", "arrived"]

    def test_notices_go_past_those_who_have_nobody_to_tell(self):
        rdma, tcp = (Path(Endpoint(name, "a:1"), "", 0, rank) for rank, name in enumerate(("rdma", "tcp")))
        rule = PauseRule(3, 1.0, 2.0)
        table = PathTable([rdma, tcp], rule)
        assert [table.choose(0, (), lambda path: 0, needs=needed) for needed in Capability] == [rdma, tcp]
        told = replace(tcp, notices_only=True)
        table = PathTable([rdma, told], rule)
        assert [table.carries(needed) for needed in Capability] == [True, True]
        assert table.choose(0, [rdma], lambda path: 0) is rdma
        assert not PathTable([rdma], rule).carries(Capability.NOTICE)

    def test_a_slice_that_is_too_long_to_verify_is_refused(self, owner: SegmentProcess):
        limits = {"tcp": replace(tcp.LIMITS, slice_bytes=1 << 30)}
        length = wire.MAX_VERIFIED_BYTES + 1
        with TransferEngine(host_id=HOST_ID, config=EngineConfig(limits=limits)) as engine:
            remote = engine.open_segment(owner.descriptor, transport="tcp")
            with pytest.raises(InvalidRequest, match="use smaller slices"):
                engine.transfer([TransferRequest(READ, bytearray(length), remote, 0, length, verify=True)], 10)


@contextlib.contextmanager
def changing_wire(port: int, opcode: Opcode) -> Iterator[int]:
    """A relay to ``port`` that changes one bit of the first payload of the first two connections."""
    listener = socket.create_server(("127.0.0.1", 0))
    begin = wire.HEAD_BYTES if opcode is WRITE else wire.REPLY_BYTES
    threads: list[threading.Thread] = []

    def relay(source: socket.socket, sink: socket.socket, place: int) -> None:
        position = 0
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(65536)):
                if position <= place < position + len(data):
                    data[place - position] ^= 0x10
                position += len(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def accept() -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for number in range(100):
                client = stack.enter_context(listener.accept()[0])
                server = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                for end in (client, server):
                    stack.callback(hang_up, end)
                place = 2 * begin + 100 if number < 2 else -1
                for ends in ((client, server, WRITE), (server, client, READ)):
                    thread = threading.Thread(target=relay, args=(*ends[:2], place if ends[2] is opcode else -1))
                    thread.start()
                    threads.append(thread)

    accepting = threading.Thread(target=accept)
    accepting.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        accepting.join(30)
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        listener.close()


def hang_up(sock: socket.socket) -> None:
    """Wake who receives from it; closing alone does not."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


class TestNotices:
    def test_they_come_once_after_the_bytes(self, engine: TransferEngine, remote: RemoteSegment, owner: SegmentProcess):
        owner.watch_notices(0, SIZE)
        source = random_bytes(SIZE, 3)
        engine.transfer([TransferRequest(WRITE, source, remote, 0, SIZE, notify=b"written")], 10)
        engine.transfer([TransferRequest(READ, bytearray(10), remote, 0, 10, notify=b"read")], 10)
        assert owner.take_notices() == [(0, b"written", checksum(source)), (0, b"read", checksum(source))]

    async def test_many_at_once(self, engine: TransferEngine, remote: RemoteSegment, owner: SegmentProcess):
        owner.watch_notices(0, 1)
        batch = TransferBatch(
            [
                TransferRequest(WRITE, bytes(100), remote, 100 * number, 100, notify=b"%d" % number)
                for number in range(300)
            ]
        )
        handles = [engine.submit(batch) for _ in range(3)]
        assert all(result.ok for result in await asyncio.gather(*(each.wait_async(20) for each in handles)))
        told = sorted(int(data) for _, data, _ in owner.take_notices())
        assert told == sorted([*range(300)] * 3)

    @pytest.mark.parametrize("notify", [b"", b"x" * 4097])
    def test_bad_sizes(self, engine: TransferEngine, remote: RemoteSegment, notify: bytes):
        with pytest.raises(InvalidRequest, match="notice"):
            engine.transfer([TransferRequest(READ, bytearray(1), remote, 0, 1, notify=notify)], 1)

    def test_an_owner_that_takes_none(self, engine: TransferEngine, transport: str):
        with SegmentProcess(size_bytes=1 << 20, notices=False) as deaf:
            remote = engine.open_segment(deaf.descriptor, transport=transport)
            with pytest.raises(InvalidRequest, match="accepts no notices"):
                engine.transfer([TransferRequest(WRITE, b"data", remote, 0, 4, notify=b"hello")], 5)
            assert deaf.peek(0, 4) == b"data"

    def test_a_session_that_is_not_open(self, engine: TransferEngine):
        with SegmentProcess(size_bytes=1 << 20, access=True) as leasing:
            session = leasing.open_session(7, os.getpid())
            leasing.watch_notices(0, 1)
            lease = leasing.grant(7, 0, 10, READ, False)
            remote = engine.open_segment(leasing.descriptor, session, transport="tcp")
            request = TransferRequest(READ, bytearray(10), remote, 0, 10, lease_id=lease, notify=b"mine")
            engine.transfer([request], 5)
            assert [(number, data) for number, data, _ in leasing.take_notices()] == [(7, b"mine")]
            other = leasing.open_session(8, None)
            with socket.create_connection(("127.0.0.1", leasing.tcp_port)) as sock:
                first, second = wire.secret_numbers(other.secret)
                hello = wire.Head(wire.Op.HELLO, 0, 8, wire.name_hash("arena"), 1, 12345, first, digest=second)
                sock.sendall(hello.pack())
                assert not wire.parse_reply(sock.recv(wire.REPLY_BYTES, socket.MSG_WAITALL))[0]
                leasing.close_session(8)
                sock.sendall(wire.Head(wire.Op.NOTICE, 1, 8, 0, 1, 99, 2).pack() + b"no")
                refused, _, text_bytes, _ = wire.parse_reply(sock.recv(wire.REPLY_BYTES, socket.MSG_WAITALL))
                error = wire.parse_error(sock.recv(text_bytes, socket.MSG_WAITALL))
            assert refused
            assert isinstance(error, Unauthorized)

    def test_they_are_lost_with_their_owner(self, engine: TransferEngine, transport: str):
        with SegmentProcess(size_bytes=1 << 20) as mortal:
            remote = engine.open_segment(mortal.descriptor, transport=transport)
            engine.transfer([TransferRequest(READ, bytearray(1), remote, 0, 1)], 5)
            mortal.kill()
            with pytest.raises(NodeUnavailable):
                engine.transfer([TransferRequest(WRITE, b"x", remote, 0, 1, notify=b"late")], 5)
