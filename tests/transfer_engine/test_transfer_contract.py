"""What every transport does alike, against a SegmentServer in another process."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from segment_process import HOST_ID, SEGMENT_BYTES, SegmentProcess, random_bytes

from tanghulu.errors import NodeUnavailable
from tanghulu.transfer_engine.engine import (
    EngineConfig,
    Opcode,
    RemoteSegment,
    TransferBatch,
    TransferCancelled,
    TransferEngine,
    TransferRequest,
    TransferState,
    TransportLimits,
)
from tanghulu.transfer_engine.transports.registry import TRANSPORTS

READ, WRITE = Opcode.READ, Opcode.WRITE


@pytest.mark.parametrize("length", [1, 2, 4095, 65537, (1 << 20) + 1, (2 << 20) + (1 << 18), 64 << 20])
@pytest.mark.parametrize("offset", [0, 4097])
def test_bytes_arrive(engine: TransferEngine, remote: RemoteSegment, owner: SegmentProcess, length: int, offset: int):
    source, destination = random_bytes(length + 7, length), np.zeros(length + 9, np.uint8)
    engine.transfer([TransferRequest(WRITE, source, remote, offset, length, source_offset=7)], 10)
    assert owner.peek(offset, min(length, 1000)) == source[7:1007].tobytes()
    engine.transfer([TransferRequest(READ, destination, remote, offset, length, source_offset=5)], 10)
    assert np.array_equal(destination[5 : 5 + length], source[7:])
    assert not destination[:5].any()
    assert not destination[5 + length :].any()


@pytest.mark.parametrize("distance", range(0, 64, 5))
def test_every_alignment(engine: TransferEngine, remote: RemoteSegment, distance: int):
    source, destination = random_bytes(1 << 17, distance), np.zeros(1 << 17, np.uint8)
    for length in (4096, 65536, 100_001):
        engine.transfer([TransferRequest(WRITE, source, remote, distance, length, 11)], 10)
        engine.transfer([TransferRequest(READ, destination, remote, distance, length, 3)], 10)
        assert np.array_equal(destination[3 : 3 + length], source[11 : 11 + length])


def test_the_edges_of_the_segment(engine: TransferEngine, remote: RemoteSegment):
    for offset in (0, SEGMENT_BYTES - 1):
        engine.transfer([TransferRequest(WRITE, b"\x5a", remote, offset, 1)], 5)
        byte = bytearray(1)
        engine.transfer([TransferRequest(READ, byte, remote, offset, 1)], 5)
        assert byte == b"\x5a"


def test_many_ranges_and_both_directions_in_one_batch(engine: TransferEngine, remote: RemoteSegment):
    source, landing = random_bytes(1 << 20, 1), np.zeros(1 << 20, np.uint8)
    engine.transfer([TransferRequest(WRITE, source, remote, 0, 1 << 20)], 10)
    out, into = engine.register(source), engine.register(landing)
    pieces = [(number * 1024, 1 + number % 1024) for number in range(1024)]
    batch = [TransferRequest(READ, into, remote, at, length, at) for at, length in pieces]
    batch += [TransferRequest(WRITE, out, remote, (4 << 20) + at, length, at) for at, length in pieces]
    handle = engine.submit(TransferBatch(batch))
    result = handle.wait(30)
    handle.check()
    assert result.ok
    assert result.num_bytes == 2 * sum(length for _, length in pieces)
    again = np.zeros(1 << 20, np.uint8)
    engine.transfer([TransferRequest(READ, again, remote, 4 << 20, 1 << 20)], 10)
    for at, length in pieces:
        assert np.array_equal(landing[at : at + length], source[at : at + length])
        assert np.array_equal(again[at : at + length], source[at : at + length])
        assert not landing[at + length : at + 1024].any()


OPERATION = st.tuples(st.sampled_from([READ, WRITE]), st.integers(0, 9000), st.integers(1, 5000))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches=st.lists(st.lists(OPERATION, min_size=1, max_size=8), min_size=1, max_size=4), seed=st.integers(0, 999))
def test_random_batches_against_a_model(
    owner: SegmentProcess, transport: str, batches: list[list[tuple[Opcode, int, int]]], seed: int
):
    limits = {name: TransportLimits(slice_bytes=512, window_bytes=1500, window_slices=3) for name in TRANSPORTS}
    config = EngineConfig(limits=limits, fast_copy_bytes=0)
    model = bytearray(14_000)
    with TransferEngine(host_id=HOST_ID, config=config) as engine:
        remote = engine.open_segment(owner.descriptor, transport=transport)
        engine.transfer([TransferRequest(WRITE, bytes(model), remote, 0, len(model))], 10)
        for number, batch in enumerate(batches):
            run_against(model, engine, remote, batch, seed + number)


def run_against(
    model: bytearray, engine: TransferEngine, remote: RemoteSegment, batch: list[tuple[Opcode, int, int]], seed: int
) -> None:
    """WRITEs go in a batch of their own where they would meet others: order inside a batch is not promised."""
    taken: list[tuple[int, int]] = []
    requests, expected = [], []
    for index, (opcode, offset, length) in enumerate(batch):
        if any(offset < end and start < offset + length for start, end in taken):
            continue
        taken.append((offset, offset + length))
        data = bytearray(random_bytes(length, seed * 100 + index).tobytes())
        requests.append(TransferRequest(opcode, data, remote, offset, length))
        if opcode is WRITE:
            model[offset : offset + length] = data
        expected.append(bytes(model[offset : offset + length]))
    handle = engine.submit(TransferBatch(requests))
    assert handle.wait(30).ok, handle.story(0)
    handle.check()
    assert [bytes(each.source) for each in requests] == expected


def test_eight_threads(engine: TransferEngine, remote: RemoteSegment):
    share = (1 if remote.transport == "rdma" else 4) << 20  # verbs are emulated, a few MB/s fast
    start = threading.Barrier(8)

    def work(number: int) -> bool:
        source, landing = random_bytes(share, number), np.zeros(share, np.uint8)
        start.wait()
        for length in (1000, 70_000, share):
            engine.transfer([TransferRequest(WRITE, source, remote, number * share, length)], 20)
            engine.transfer([TransferRequest(READ, landing, remote, number * share, length)], 20)
        return np.array_equal(source, landing)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_more_threads_than_links(owner: SegmentProcess, transport: str):
    config = EngineConfig(max_links_per_peer=2, fast_copy_bytes=0)
    with TransferEngine(host_id=HOST_ID, config=config) as engine:
        remote = engine.open_segment(owner.descriptor, transport=transport)

        def work(number: int) -> bytes:
            landing = bytearray(100)
            engine.transfer([TransferRequest(WRITE, bytes([number]) * 100, remote, number * 100, 100)], 10)
            engine.transfer([TransferRequest(READ, landing, remote, number * 100, 100)], 10)
            return bytes(landing)

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(work, range(8))) == [bytes([number]) * 100 for number in range(8)]
        engine.check()


async def test_asyncio(engine: TransferEngine, owner: SegmentProcess, transport: str):
    remote = await engine.open_segment_async(owner.descriptor, transport=transport)
    sources = [random_bytes(1 + number * 300_000, number) for number in range(8)]
    places = [number << 22 for number in range(8)]
    writes = [TransferRequest(WRITE, each, remote, at, each.size) for each, at in zip(sources, places, strict=True)]
    await asyncio.gather(*(engine.transfer_async([each], 10) for each in writes))
    landings = [np.zeros(each.size, np.uint8) for each in sources]
    reads = [TransferRequest(READ, each, remote, at, each.size) for each, at in zip(landings, places, strict=True)]
    assert (await engine.submit(TransferBatch(reads)).wait_async(10)).ok
    assert all(np.array_equal(a, b) for a, b in zip(sources, landings, strict=True))


def test_one_batch_to_several_segments(engine: TransferEngine, remote: RemoteSegment, owner: SegmentProcess):
    other = engine.open_segment(owner.descriptor, session_id=5)
    assert other is not remote
    a, b = bytearray(3 << 20), bytearray(3 << 20)
    batch = TransferBatch([TransferRequest(READ, a, remote, 0, 3 << 20), TransferRequest(READ, b, other, 0, 3 << 20)])
    assert engine.submit(batch).wait(30).ok
    assert a == b


def test_status_moves_a_batch_along(engine: TransferEngine, remote: RemoteSegment):
    handle = engine.submit(TransferBatch([TransferRequest(READ, bytearray(100), remote, 0, 100)]))
    while handle.status() != [TransferState.COMPLETE]:
        handle.check()
    assert handle.done
    assert handle.done_bytes == 100
    assert handle.wait(0).ok
    assert handle.wait(float("inf")).num_bytes == 100
    assert [line.split(maxsplit=3)[3].split()[0] for line in handle.story(0)] == ["post", "arrived"]


def test_an_empty_batch_is_complete(engine: TransferEngine):
    assert engine.submit(TransferBatch([])).wait(0).ok


def test_cancel_before_waiting(engine: TransferEngine, remote: RemoteSegment):
    landing = bytearray(32 << 20)
    handle = engine.submit(TransferBatch([TransferRequest(READ, landing, remote, 0, len(landing))]))
    handle.cancel()
    result = handle.wait(30)
    assert isinstance(result.errors[0], TransferCancelled)
    assert result.num_bytes == 0
    handle.check()
    engine.transfer([TransferRequest(READ, landing, remote, 0, len(landing))], 10)  # the peer is still of use


def test_a_dropped_handle_lets_its_links_go(owner: SegmentProcess, transport: str):
    with TransferEngine(host_id=HOST_ID, config=EngineConfig(max_links_per_peer=1)) as engine:
        remote = engine.open_segment(owner.descriptor, transport=transport)
        handle = engine.submit(TransferBatch([TransferRequest(READ, bytearray(8 << 20), remote, 0, 8 << 20)]))
        del handle
        assert engine.submit(TransferBatch([TransferRequest(READ, bytearray(10), remote, 0, 10)])).wait(30).ok


def test_opening_twice_gives_one_segment(engine: TransferEngine, remote: RemoteSegment, owner: SegmentProcess):
    assert engine.open_segment(owner.descriptor, transport=remote.transport) is remote
    remote.close()
    again = engine.open_segment(owner.descriptor, transport=remote.transport)
    assert again is not remote
    assert again.alive
    with pytest.raises(NodeUnavailable):
        engine.transfer([TransferRequest(READ, bytearray(1), remote, 0, 1)], 1)


def test_shm_is_preferred_and_maps(engine: TransferEngine, owner: SegmentProcess):
    remote = engine.open_segment(owner.descriptor)
    assert remote.transport == "shm"
    view = remote.map()
    assert view is not None
    owner.poke(123, b"zero-copy")
    assert bytes(view[123:132]) == b"zero-copy"
    piece = view[123:132]
    remote.close()
    assert remote.map() is None
    assert bytes(piece) == b"zero-copy"  # slices keep the pages


def test_another_host_uses_tcp(owner: SegmentProcess):
    with TransferEngine(host_id="elsewhere") as engine:
        remote = engine.open_segment(owner.descriptor)
        assert remote.transport == "tcp"
        assert remote.map() is None
        with pytest.raises(NodeUnavailable, match="shm: it is on host 'test-host'"):
            engine.open_segment(owner.descriptor, transport="shm")


def test_a_bound_device(owner: SegmentProcess):
    with TransferEngine(host_id=HOST_ID, config=EngineConfig(tcp_devices=("lo",))) as engine:
        remote = engine.open_segment(owner.descriptor, transport="tcp")
        engine.transfer([TransferRequest(READ, bytearray(10), remote, 0, 10)], 5)
