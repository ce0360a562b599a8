"""What rdma and ucx have in common, from the link to the owner's door, over ends that any machine has.

Owner and client are in one process here, and a far end is a promise not to copy after it was closed. It stands where
rdma's queue pairs do, so everything but the devices is the production code.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from segment_process import HOST_ID, Owner, random_bytes, warm_up
from test_transfer_bad_input import TestBadInput  # noqa: F401 - pytest collects it from here
from test_transfer_checks import TestChecksums  # noqa: F401 - pytest collects it from here
from test_transfer_contract import (  # noqa: F401 - pytest collects them from here
    test_a_dropped_handle_lets_its_links_go,
    test_asyncio,
    test_cancel_before_waiting,
    test_eight_threads,
    test_every_alignment,
    test_many_ranges_and_both_directions_in_one_batch,
    test_more_threads_than_links,
    test_one_batch_to_several_segments,
    test_opening_twice_gives_one_segment,
    test_random_batches_against_a_model,
    test_status_moves_a_batch_along,
    test_the_edges_of_the_segment,
)

from tanghulu.errors import ChecksumMismatch, DeadlineExceeded, LeaseExpired, NodeUnavailable, TransferFailed
from tanghulu.transfer_engine import engine as engine_module
from tanghulu.transfer_engine import remote as remote_module
from tanghulu.transfer_engine import server as server_module
from tanghulu.transfer_engine.engine import (
    EngineConfig,
    Opcode,
    RemoteSegment,
    TransferBatch,
    TransferEngine,
    TransferRequest,
)
from tanghulu.transfer_engine.onesided_link import OneSidedPeer
from tanghulu.transfer_engine.onesided_server import Grant
from tanghulu.transfer_engine.paths import Path
from tanghulu.transfer_engine.rdma_devices import LocalDevices
from tanghulu.transfer_engine.rdma_verbs import DeviceInfo
from tanghulu.transfer_engine.rdma_wire import RDMA
from tanghulu.transfer_engine.slices import Slice
from tanghulu.transfer_engine.staged_slots import StagedSlots
from tanghulu.transfer_engine.transport import Completion

READ, WRITE = Opcode.READ, Opcode.WRITE
SIZE = 3 << 20
DEVICE = "here0"


class Wires:
    """What the tests do to the copies: change bytes of the next ones, keep slices back, break the next."""

    def __init__(self) -> None:
        self.num_changed = 0
        self.kept_back = False
        self.num_broken = 0
        self.num_copies = 0
        #: Far ends that are open, by their address: the number of copies is checked against it.
        self.open: set[int] = set()
        self.granting = threading.Event()
        self.granting.set()


class HereEnd:
    def __init__(self, wires: Wires) -> None:
        self._wires = wires
        wires.open.add(id(self))

    def close(self) -> None:
        self._wires.open.discard(id(self))


class HereEnds:
    """The segment's address, and an end that says whether it is open still."""

    dialect = RDMA
    devices = (DEVICE,)
    max_ends = 1000

    def __init__(self, segment: Any, wires: Wires) -> None:
        self._segment, self._wires = segment, wires

    async def start(self) -> None:
        pass

    def admit(self, asked: bytes) -> None:
        assert asked == b"please"

    async def make(self, token: int, asked: bytes, take: Callable[[Grant], None]) -> None:
        await asyncio.to_thread(self._wires.granting.wait)
        end = HereEnd(self._wires)
        take(Grant(end, self._segment.address.to_bytes(8, "little") + id(end).to_bytes(8, "little")))

    def close(self) -> None:
        pass


class HereMover:
    """Copies when it is asked what has landed."""

    asked = b"please"

    def __init__(self, wires: Wires) -> None:
        self.ready = False
        self._wires = wires
        self._slots = StagedSlots(4)
        self._posted: list[tuple[Slice, int | None]] = []

    def connect(self, granted: bytes) -> None:
        self._address, self._end = (int.from_bytes(granted[at : at + 8], "little") for at in (0, 8))
        self.ready = True

    def advance(self) -> None:
        pass

    def has_room_for(self, piece: Slice) -> bool:
        return self._slots.has_room_for(piece)

    def post(self, piece: Slice) -> None:
        self._posted.append((piece, self._slots.take(piece)))

    def flush(self) -> None:
        pass

    @property
    def num_posted(self) -> int:
        return len(self._posted)

    @property
    def writing(self) -> bool:
        return any(piece.opcode is WRITE for piece, _ in self._posted)

    def collect(self, landed: list[Slice], ended: list[Completion]) -> None:
        while self._posted and not self._wires.kept_back:
            if self._wires.num_broken:
                self._wires.num_broken -= 1
                raise TransferFailed("the wire is broken")
            piece, slot = self._posted[0]
            self._move(piece, slot)
            self._posted.pop(0)
            if slot is not None:
                self._slots.put(slot, piece)
                self._slots.check()
            landed.append(piece)

    def _move(self, piece: Slice, slot: int | None) -> None:
        if self._end not in self._wires.open:
            raise NodeUnavailable("the owner's end is closed")
        here = piece.buffer.address + piece.local_offset if slot is None else self._slots.address(slot)
        there = self._address + piece.remote_offset
        to, source = (here, there) if piece.opcode is READ else (there, here)
        ctypes.memmove(to, source, piece.length)
        self._wires.num_copies += 1
        if self._wires.num_changed:
            self._wires.num_changed -= 1
            ctypes.c_uint8.from_address(to + piece.length // 2).value ^= 4

    def fileno(self) -> int:
        return -1

    def arm(self) -> None:
        pass

    def woken(self) -> None:
        pass

    def close(self) -> None:
        self._posted.clear()


class HereMovers:
    dialect = RDMA

    def __init__(self, wires: Wires) -> None:
        self._wires = wires

    def make(self, path: Path, token: int, wake: Callable[[], None]) -> HereMover:
        assert path.local_device == path.endpoint.device == DEVICE
        return HereMover(self._wires)

    def close(self) -> None:
        pass


class HereOwner:
    """A SegmentProcess without the process: its loop runs in a thread."""

    def __init__(self, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        access = options.pop("access", False)
        settings = {"unix_path": None, "generation": 1, "rdma_devices": ()} | options
        self.owner = Owner(80 << 20, access, settings)
        self._run(self.owner.server.start())
        self.descriptor = self.owner.server.descriptor()

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments: self._run(getattr(self.owner, name)(*arguments))

    def close(self) -> None:
        self.owner.server.check()
        self._run(self.owner.server.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()
        self.owner.segment.close()


@pytest.fixture(autouse=True)
def no_descriptor_leaks(wires: Wires) -> Iterator[None]:
    """The owner's half of a connection is in this process, too, and its loop takes a moment to close it."""
    warm_up()
    before = num_descriptors()
    yield
    until_s = time.monotonic() + 5
    while num_descriptors() > before and time.monotonic() < until_s:
        gc.collect()
    assert num_descriptors() <= before, "descriptors leak"


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(scope="module")
def wires() -> Iterator[Wires]:
    """They stand where rdma's devices do."""
    wires, found = Wires(), LocalDevices([DeviceInfo(DEVICE, "::1", 0, 0, 5)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_module, "RdmaEnds", lambda segment, names: HereEnds(segment, wires))
        patch.setattr(engine_module, "LocalDevices", type("Found", (), {"find": lambda wanted: found}))
        patch.setattr(
            remote_module,
            "rdma_peer",
            lambda descriptor, session_id, devices, fences: OneSidedPeer(
                descriptor, session_id, fences, lambda: HereMovers(wires)
            ),
        )
        yield wires


@pytest.fixture(scope="module")
def owner(wires: Wires) -> Iterator[HereOwner]:
    owner = HereOwner()
    yield owner
    owner.close()


@pytest.fixture
def leasing(no_descriptor_leaks: None) -> Iterator[HereOwner]:
    owner = HereOwner(access=True)
    yield owner
    owner.close()


@pytest.fixture
def transport(wires: Wires) -> str:
    return "rdma"


@pytest.mark.parametrize("length", [1, 65_536, 65_537, SIZE + 1])
def test_bytes_arrive(engine: TransferEngine, remote: RemoteSegment, owner: HereOwner, length: int):
    """Buffers up to 64 KiB are staged, others not."""
    source, destination = random_bytes(length + 7, length), np.zeros(length + 9, np.uint8)
    engine.transfer([TransferRequest(WRITE, source, remote, 4097, length, source_offset=7)], 10)
    assert owner.peek(4097, min(length, 1000)) == source[7:1007].tobytes()
    engine.transfer([TransferRequest(READ, destination, remote, 4097, length, source_offset=5)], 10)
    assert np.array_equal(destination[5 : 5 + length], source[7:])
    assert not destination[:5].any()
    assert not destination[5 + length :].any()


@pytest.mark.parametrize("opcode", list(Opcode))
@pytest.mark.parametrize("length", [1000, SIZE])
def test_a_slice_that_was_changed_is_moved_once_more(
    engine: TransferEngine, remote: RemoteSegment, owner: HereOwner, wires: Wires, opcode: Opcode, length: int
):
    there, here = random_bytes(length, 1), random_bytes(length, 2)
    owner.poke(10, there.tobytes())
    wires.num_changed = 1
    handle = engine.submit(TransferBatch([TransferRequest(opcode, here, remote, 10, length, verify=True)]))
    assert handle.wait(10).ok, handle.story(0)
    handle.check()
    assert owner.peek(10, length) == here.tobytes()
    assert opcode is WRITE or np.array_equal(here, there)
    assert sum("corrupt" in line for line in handle.story(0)) == 1
    assert sum(stats.num_mismatches for _, _, stats in remote.path_stats()) == 1


@pytest.mark.parametrize("opcode", list(Opcode))
def test_one_that_is_changed_again_fails(engine: TransferEngine, remote: RemoteSegment, wires: Wires, opcode: Opcode):
    plain = TransferRequest(opcode, bytearray(1000), remote, 0, 1000)
    wires.num_changed = 1
    engine.transfer([plain], 5)  # nobody asked
    wires.num_changed = 2
    with pytest.raises(ChecksumMismatch, match=r"1000 bytes have checksum .* here, .* at the owner"):
        engine.transfer([TransferRequest(opcode, bytearray(1000), remote, 0, 1000, verify=True)], 5)
    assert wires.num_changed == 0


def test_a_range_is_compared_under_its_lease_alone(leasing: HereOwner, engine: TransferEngine, wires: Wires):
    leasing.open_session(7, None)
    remote = engine.open_segment(leasing.descriptor, session_id=7, transport="rdma")
    read, write = leasing.grant(7, 0, 1000, READ, False), leasing.grant(7, 1000, 1000, WRITE, False)
    data = bytearray(1000)
    engine.transfer([TransferRequest(WRITE, data, remote, 1000, 1000, lease_id=write, verify=True)], 5)
    engine.transfer([TransferRequest(READ, data, remote, 0, 1000, lease_id=read, verify=True)], 5)
    with pytest.raises(LeaseExpired):
        engine.transfer([TransferRequest(READ, data, remote, 0, 1000, lease_id=99, verify=True)], 5)
    for opcode, lease, offset in ((READ, write, 1000), (WRITE, read, 0), (READ, read, 500)):
        with pytest.raises(Exception, match="lease"):
            engine.transfer([TransferRequest(opcode, data, remote, offset, 1000, lease_id=lease, verify=True)], 5)
    leasing.owner.access.check()


def test_no_range_is_free_while_an_end_reaches_it(leasing: HereOwner, engine: TransferEngine, wires: Wires):
    leasing.open_session(7, None)
    remote = engine.open_segment(leasing.descriptor, session_id=7, transport="rdma")
    lease = leasing.grant(7, 0, 100, WRITE, False)
    engine.transfer([TransferRequest(WRITE, bytes(100), remote, 0, 100, lease_id=lease)], 5)
    assert wires.open
    assert leasing.pass_time(2.0) == []
    assert [each.lease_id for each in leasing.next_freed()] == [lease]
    assert not wires.open
    with pytest.raises(LeaseExpired):
        engine.transfer([TransferRequest(WRITE, b"late", remote, 0, 4, lease_id=lease)], 5)


def test_a_write_that_was_given_up_leaves_no_end_behind(engine: TransferEngine, owner: HereOwner, wires: Wires):
    remote = engine.open_segment(owner.descriptor, transport="rdma")
    wires.kept_back = True
    with pytest.raises(DeadlineExceeded):
        engine.transfer([TransferRequest(WRITE, bytes(SIZE), remote, 0, SIZE)], 0.2)
    wires.kept_back = False
    assert not wires.open  # the owner has said so before the deadline was told
    num_copies = wires.num_copies
    engine.transfer([TransferRequest(WRITE, b"next", remote, 0, 4)], 5)
    assert wires.num_copies == num_copies + 1
    assert owner.counters()["fenced"] == 0


def test_an_owner_that_does_not_answer_is_told_by_a_fence(engine: TransferEngine, owner: HereOwner, wires: Wires):
    remote = engine.open_segment(owner.descriptor, transport="rdma")
    fenced = owner.counters()["fenced"]
    wires.kept_back = True
    held = threading.Event()
    owner._loop.call_soon_threadsafe(held.wait)
    with pytest.raises(DeadlineExceeded):
        engine.transfer([TransferRequest(WRITE, bytes(SIZE), remote, 0, SIZE)], 0.1)
    wires.kept_back = False
    held.set()
    engine.transfer([TransferRequest(WRITE, b"next", remote, 0, 4)], 5)
    assert owner.counters()["fenced"] == fenced + 1


@pytest.mark.parametrize("verify", [False, True])
def test_what_a_broken_end_had_is_tried_again(
    engine: TransferEngine, remote: RemoteSegment, owner: HereOwner, wires: Wires, verify: bool
):
    source = random_bytes(SIZE, 3)
    wires.num_broken = 2
    handle = engine.submit(TransferBatch([TransferRequest(WRITE, source, remote, 0, SIZE, verify=verify)]))
    assert handle.wait(10).ok, handle.story(0)
    assert any("the wire is broken" in line for line in handle.story(0))
    assert owner.peek(0, SIZE) == source.tobytes()


def test_verified_from_many_threads(engine: TransferEngine, remote: RemoteSegment, owner: HereOwner, wires: Wires):
    def work(number: int) -> bool:
        source, landing = random_bytes(SIZE, number), np.zeros(SIZE, np.uint8)
        at = number * SIZE
        engine.transfer([TransferRequest(WRITE, source, remote, at, SIZE, verify=True, notify=b"w")], 20)
        engine.transfer([TransferRequest(READ, landing, remote, at, SIZE, verify=True)], 20)
        return np.array_equal(source, landing)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_an_end_that_takes_long_to_make(owner: HereOwner, wires: Wires):
    config = EngineConfig(connect_timeout_s=0.2)
    wires.granting.clear()
    with TransferEngine(host_id=HOST_ID, config=config) as engine:
        with pytest.raises(NodeUnavailable, match="did not answer"):
            engine.open_segment(owner.descriptor, transport="rdma")
        wires.granting.set()
        remote = engine.open_segment(owner.descriptor, transport="rdma")
        engine.transfer([TransferRequest(READ, bytearray(9), remote, 0, 9)], 5)
