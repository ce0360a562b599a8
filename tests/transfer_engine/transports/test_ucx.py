"""The contract over ucx, and what happens to its agents; where NIXL (the extra ``ucx``) is installed."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import numpy as np
import pytest

from tanghulu.errors import DeadlineExceeded, LeaseExpired, NodeUnavailable
from tanghulu.transfer_engine.engine import EngineConfig, Opcode, TransferBatch, TransferEngine, TransferRequest
from tanghulu.transfer_engine.transports.ucx.agent import probe
from tests.contracts.transfer import (  # noqa: F401 - pytest collects them from here
    TestBadInput,
    TestChecksums,
    test_a_dropped_handle_lets_its_links_go,
    test_an_empty_batch_is_complete,
    test_asyncio,
    test_bytes_arrive,
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
from tests.transfer_engine.segment_process import HOST_ID, SegmentProcess, random_bytes

READ, WRITE = Opcode.READ, Opcode.WRITE
LARGE = 64 << 20
pytestmark = pytest.mark.skipif(bool(probe()), reason=f"extra: {probe()}")


@pytest.fixture(scope="module")
def owner() -> Iterator[SegmentProcess]:
    with SegmentProcess(transports=("shm", "ucx", "tcp")) as process:
        yield process


@pytest.fixture
def transport() -> str:
    return "ucx"


@pytest.fixture
def mortal(no_descriptor_leaks: None) -> Iterator[SegmentProcess]:
    with SegmentProcess(transports=("shm", "ucx", "tcp")) as process:
        yield process


@pytest.fixture
def leasing(no_descriptor_leaks: None) -> Iterator[SegmentProcess]:
    with SegmentProcess(transports=("shm", "ucx", "tcp"), access=True, size_bytes=4 << 20) as process:
        yield process


@pytest.mark.parametrize("opcode", list(Opcode))
def test_killed_during_a_transfer(mortal: SegmentProcess, engine: TransferEngine, opcode: Opcode):
    remote = engine.open_segment(mortal.descriptor, transport="ucx")
    handle = engine.submit(TransferBatch([TransferRequest(opcode, bytearray(LARGE), remote, 0, LARGE)]))
    mortal.kill()
    result = handle.wait(30)
    handle.check()
    assert isinstance(result.errors[0], NodeUnavailable), handle.story(0)
    assert result.num_bytes == 0
    remote.close()
    with pytest.raises(NodeUnavailable, match="cannot be opened"):
        engine.open_segment(mortal.descriptor, transport="ucx")


def test_a_write_that_was_given_up_does_not_land_later(mortal: SegmentProcess, engine: TransferEngine):
    """The owner stalls with it on the wire; the next slice is served behind the end of the first one's agent."""
    remote = engine.open_segment(mortal.descriptor, transport="ucx")
    engine.transfer([TransferRequest(WRITE, b"warm", remote, 0, 4)], 10)
    mortal.signal(signal.SIGSTOP)
    late = random_bytes(300_000, 3)
    with pytest.raises(DeadlineExceeded):
        engine.transfer([TransferRequest(WRITE, late, remote, 0, late.size)], 0.3)
    mortal.signal(signal.SIGCONT)
    newer = random_bytes(300_000, 4)
    engine.transfer([TransferRequest(WRITE, newer, remote, 0, newer.size)], 10)
    assert mortal.counters()["fenced"] >= 1
    assert mortal.peek(0, newer.size) == newer.tobytes()


def test_ucx_fails_over_to_tcp(mortal: SegmentProcess):
    with TransferEngine(host_id="elsewhere", config=EngineConfig(slice_deadline_s=5)) as engine:
        remote = engine.open_segment(mortal.descriptor)
        assert remote.transport == "ucx"
        source, landing = random_bytes(9 << 20, 5), np.zeros(9 << 20, np.uint8)
        engine.transfer([TransferRequest(WRITE, source, remote, 3, source.size)], 10)
        mortal.close_ucx()
        engine.transfer([TransferRequest(READ, landing, remote, 3, source.size)], 10)
        assert np.array_equal(source, landing)
        used = [(path.transport, stats.num_bytes) for path, _, stats in remote.path_stats()]
        for transport in ("ucx", "tcp"):
            assert sum(num_bytes for name, num_bytes in used if name == transport) == source.size


def test_leases(leasing: SegmentProcess, engine: TransferEngine):
    session = leasing.open_session(7, None)
    remote = engine.open_segment(leasing.descriptor, session, transport="ucx")
    lease = leasing.grant(7, 1000, 500, WRITE, False)
    data = random_bytes(500, 1)
    engine.transfer([TransferRequest(WRITE, data, remote, 1000, 500, lease_id=lease)], 10)
    assert leasing.peek(1000, 500) == data.tobytes()
    for wrong in (lease + 1, 0):
        with pytest.raises(LeaseExpired):
            engine.transfer([TransferRequest(WRITE, data, remote, 1000, 500, lease_id=wrong)], 10)


def test_a_range_is_free_when_the_agents_of_its_lease_are_closed(leasing: SegmentProcess, engine: TransferEngine):
    session = leasing.open_session(7, None)
    remote = engine.open_segment(leasing.descriptor, session, transport="ucx")
    lease = leasing.grant(7, 0, 100, WRITE, False)
    engine.transfer([TransferRequest(WRITE, bytes(100), remote, 0, 100, lease_id=lease)], 10)
    assert leasing.pass_time(2.0) == []  # not while the session's agent lives
    assert [each.lease_id for each in leasing.next_freed()] == [lease]
    assert not leasing.busy(0, 100)
    with pytest.raises(LeaseExpired):
        engine.transfer([TransferRequest(WRITE, b"late", remote, 0, 4, lease_id=lease)], 10)


def test_another_generation_is_refused(mortal: SegmentProcess):
    descriptor = mortal.descriptor
    old = type(descriptor)(descriptor.name, descriptor.size_bytes, HOST_ID, 99, descriptor.endpoints)
    with TransferEngine(host_id=HOST_ID) as engine, pytest.raises(NodeUnavailable, match="generation 99"):
        engine.open_segment(old, transport="ucx")
