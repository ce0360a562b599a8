"""shm without a mapping: the kernel copies between two processes."""

from __future__ import annotations

import errno
import resource
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tanghulu.errors import NodeUnavailable
from tanghulu.transfer_engine.engine import Opcode, RemoteSegment, TransferBatch, TransferEngine, TransferRequest
from tanghulu.transfer_engine.transports.shm import transport as shm
from tanghulu.transfer_engine.transports.shm.memory import ProcessMemory, may_trace
from tests.transfer_engine.segment_process import SEGMENT_BYTES, SegmentProcess, random_bytes

READ, WRITE = Opcode.READ, Opcode.WRITE


@pytest.fixture
def unmapped(owner: SegmentProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """No segment can be mapped."""
    if not may_trace(owner.process.pid):
        pytest.skip("this kernel does not let us read another process's memory")

    def fail(fd: int, size_bytes: int) -> None:
        raise OSError(errno.ENOMEM, "no room")

    monkeypatch.setattr(shm, "map_shared", fail)


@pytest.fixture
def remote(unmapped: None, engine: TransferEngine, owner: SegmentProcess) -> Iterator[RemoteSegment]:
    remote = engine.open_segment(owner.descriptor)
    assert remote.transport == "shm"
    assert remote.shm is not None
    assert remote.shm.view is None
    assert remote.map() is None
    yield remote
    remote.close()


@pytest.mark.parametrize("length", [1, 4097, (1 << 20) + 3, 64 << 20])
def test_bytes_arrive(engine: TransferEngine, remote: RemoteSegment, owner: SegmentProcess, length: int):
    source, landing = random_bytes(length, length), np.zeros(length + 2, np.uint8)
    engine.transfer([TransferRequest(WRITE, source, remote, 5, length)], 10)
    assert owner.peek(5, min(length, 1000)) == source[:1000].tobytes()
    engine.transfer([TransferRequest(READ, landing, remote, 5, length, 1)], 10)
    assert np.array_equal(landing[1:-1], source)
    assert not landing[0]
    assert not landing[-1]


def test_many_requests_verified_and_notified(engine: TransferEngine, remote: RemoteSegment, owner: SegmentProcess):
    owner.watch_notices(0, 1)
    data = random_bytes(100 * 1000, 1)
    batch = [TransferRequest(WRITE, data, remote, at, 1000, at, verify=True) for at in range(0, data.size, 1000)]
    batch[7].notify = b"seven"
    assert engine.submit(TransferBatch(batch)).wait(30).ok
    assert owner.peek(0, data.size) == data.tobytes()
    assert [text for _, text, _ in owner.take_notices()] == [b"seven"]


def test_threads(engine: TransferEngine, remote: RemoteSegment):
    start = threading.Barrier(4)

    def work(number: int) -> bool:
        source, landing = random_bytes(1 << 20, number), np.zeros(1 << 20, np.uint8)
        start.wait()
        engine.transfer([TransferRequest(WRITE, source, remote, number << 20, 1 << 20)], 10)
        engine.transfer([TransferRequest(READ, landing, remote, number << 20, 1 << 20)], 10)
        return np.array_equal(source, landing)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_an_owner_that_is_killed(unmapped: None, engine: TransferEngine):
    with SegmentProcess(size_bytes=8 << 20) as mortal:
        remote = engine.open_segment(mortal.descriptor, transport="shm")
        engine.transfer([TransferRequest(READ, bytearray(10), remote, 0, 10)], 5)
        mortal.signal(signal.SIGKILL)
        mortal.process.join()
        for length in (10, 8 << 20):
            with pytest.raises(NodeUnavailable):
                engine.transfer([TransferRequest(WRITE, bytes(length), remote, 0, length)], 5)
        remote.close()


def test_without_address_space_for_the_mapping(owner: SegmentProcess, engine: TransferEngine):
    """For real: the kernel refuses to map what a limit forbids."""
    if not may_trace(owner.process.pid):
        pytest.skip("this kernel does not let us read another process's memory")
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + SEGMENT_BYTES // 2, before[1]))
    try:
        remote = engine.open_segment(owner.descriptor)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert remote.shm is not None
    assert remote.shm.view is None
    engine.transfer([TransferRequest(WRITE, b"copied", remote, 0, 6)], 5)
    assert owner.peek(0, 6) == b"copied"


def test_what_is_forbidden_falls_back_to_tcp(owner: SegmentProcess, engine: TransferEngine, monkeypatch):
    def forbidden(pid: int, address: int) -> None:
        raise NodeUnavailable("process_vm_readv: Operation not permitted")

    def unmappable(fd: int, size_bytes: int) -> None:
        raise OSError(errno.ENOMEM, "no room")

    monkeypatch.setattr(shm, "map_shared", unmappable)
    monkeypatch.setattr(shm, "ProcessMemory", forbidden)
    assert engine.open_segment(owner.descriptor).transport == "tcp"
    with pytest.raises(NodeUnavailable, match=r"no room.*not permitted"):
        engine.open_segment(owner.descriptor, transport="shm")


def test_addresses_outside_of_the_segment_are_the_kernel_s_errors(owner: SegmentProcess):
    if not may_trace(owner.process.pid):
        pytest.skip("this kernel does not let us read another process's memory")
    with pytest.raises(NodeUnavailable, match="Bad address"):
        ProcessMemory(owner.process.pid or 0, 4096)
    with pytest.raises(NodeUnavailable, match="No such process"):
        ProcessMemory((1 << 22) + 1, 4096)
