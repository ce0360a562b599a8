"""What rdma and ucx have in common, from the link to the owner's listener, over ends that any machine has.

Owner and client are in one process here, and a far end is a promise not to copy after it was closed. It stands where
rdma's queue pairs do, so everything but the devices is the production code.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tanghulu.auth.credentials import NO_TLS, TlsFiles
from tanghulu.errors import ChecksumMismatch, DeadlineExceeded, LeaseExpired, NodeUnavailable
from tanghulu.transfer_engine.engine import (
    EngineConfig,
    Opcode,
    RemoteSegment,
    TransferBatch,
    TransferEngine,
    TransferRequest,
)
from tanghulu.transfer_engine.transports.onesided import control
from tanghulu.transfer_engine.transports.onesided.link import OneSidedLink
from tanghulu.transfer_engine.transports.rdma import transport as rdma
from tanghulu.transfer_engine.transports.rdma.devices import LocalDevices
from tanghulu.transfer_engine.transports.rdma.verbs import DeviceInfo
from tests.contracts.transfer import (  # noqa: F401 - pytest collects them from here
    TestBadInput,
    TestChecksums,
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
from tests.tls_files import Authority
from tests.transfer_engine.segment_process import HOST_ID, random_bytes, warm_up
from tests.transfer_engine.transports.onesided_rig import (
    DEVICE,
    READ,
    SIZE,
    WRITE,
    HereEnds,
    HereMovers,
    HereOwner,
    Wires,
)


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
        patch.setattr(rdma, "RdmaEnds", lambda segment, names: HereEnds(segment, wires))
        patch.setattr(rdma, "LocalDevices", type("Found", (), {"find": lambda wanted: found}))
        patch.setattr(rdma, "RdmaMovers", lambda devices: HereMovers(wires))
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
    session = leasing.open_session(7, None)
    remote = engine.open_segment(leasing.descriptor, session, transport="rdma")
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


def test_leases_of_the_past_are_forgotten(
    leasing: HereOwner, engine: TransferEngine, wires: Wires, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(control, "_MAX_KNOWN_LEASES", 4)
    remote = engine.open_segment(leasing.descriptor, leasing.open_session(7, None), transport="rdma")
    leases = [*(leasing.grant(7, 100 * number, 100, WRITE, False) for number in range(9)), 99]
    requests = [
        TransferRequest(WRITE, bytes(9), remote, 100 * number, 9, lease_id=lease) for number, lease in enumerate(leases)
    ]
    for _ in range(3):
        errors = engine.submit(TransferBatch(requests)).wait(5).errors
        assert [type(each) for each in errors] == [type(None)] * 9 + [LeaseExpired]
        engine.transfer(requests[:1], 5)
        (link,) = remote._pools["rdma"]._idle
        assert isinstance(link, OneSidedLink)
        (connection,) = link._connections.values()
        assert len(connection.control.refusals) <= 5


def test_control_connections_are_encrypted(wires: Wires, tmp_path: Path):
    """An owner with TLS serves nobody who comes plain, and a client with TLS gives its secret to nobody plain."""
    authority = Authority(tmp_path)
    files = TlsFiles(*authority.sign("host"), authority.ca)
    for shown, expected in ((files, files), (NO_TLS, files), (files, NO_TLS)):
        owner = HereOwner(access=True, **({"tls": shown} if shown else {}))
        session = owner.open_session(7, None)
        lease = owner.grant(7, 0, SIZE, WRITE, False)
        config = EngineConfig(tls=expected, connect_timeout_s=0.5)
        with TransferEngine(transports=("rdma",), host_id=HOST_ID, config=config) as engine:
            if shown == expected:
                remote = engine.open_segment(owner.descriptor, session, transport="rdma")
                engine.transfer([TransferRequest(WRITE, bytes(SIZE), remote, 0, SIZE, lease_id=lease)], 30)
            else:
                with pytest.raises(NodeUnavailable):
                    engine.open_segment(owner.descriptor, session, transport="rdma")
        owner.close()


def test_no_range_is_free_while_an_end_reaches_it(leasing: HereOwner, engine: TransferEngine, wires: Wires):
    session = leasing.open_session(7, None)
    remote = engine.open_segment(leasing.descriptor, session, transport="rdma")
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
