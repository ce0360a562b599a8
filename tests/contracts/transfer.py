"""What every transport does alike, against a SegmentServer in another process.

A test module of each transport imports these tests and says by the fixture ``transport`` which one it is; the
other fixtures are ``engine``, ``owner`` and ``remote``. One that cannot pass a test imports the others by name.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from tanghulu.errors import ChecksumMismatch, DeadlineExceeded, InvalidRequest, NodeUnavailable
from tanghulu.transfer_engine.core.segment import SessionKey
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
from tests.transfer_engine.segment_process import HOST_ID, SEGMENT_BYTES, SegmentProcess, random_bytes

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
    other = engine.open_segment(owner.descriptor, SessionKey(5, bytes(16)))
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


class TestBadInput:
    def bad(self, engine: TransferEngine, *requests: TransferRequest) -> None:
        for attempt in (
            lambda: engine.transfer(requests, 1),
            lambda: engine.submit(TransferBatch(requests)),
            lambda: asyncio.run(engine.transfer_async(requests, 1)),
        ):
            with pytest.raises(InvalidRequest):
                attempt()

    @pytest.mark.parametrize(
        ("target_offset", "length", "source_offset"),
        [(0, 0, 0), (0, -1, 0), (-1, 5, 0), (SEGMENT_BYTES, 1, 0), (SEGMENT_BYTES - 5, 6, 0), (0, 101, 0), (0, 1, 100),
         (0, 5, -1), (1 << 70, 1, 0)],
    )  # fmt: skip
    def test_ranges(
        self, engine: TransferEngine, remote: RemoteSegment, target_offset: int, length: int, source_offset: int
    ):
        for opcode in Opcode:
            self.bad(engine, TransferRequest(opcode, bytearray(100), remote, target_offset, length, source_offset))

    def test_buffers(self, engine: TransferEngine, remote: RemoteSegment):
        self.bad(engine, TransferRequest(READ, b"read-only", remote, 0, 5))
        self.bad(engine, TransferRequest(WRITE, np.zeros((4, 4))[:, ::2], remote, 0, 5))
        self.bad(engine, TransferRequest(WRITE, "text", remote, 0, 1))
        self.bad(engine, TransferRequest(WRITE, b"", remote, 0, 1))
        gone = engine.register(bytearray(10))
        gone.unregister()
        self.bad(engine, TransferRequest(READ, gone, remote, 0, 5))

    def test_an_opcode_that_is_none(self, engine: TransferEngine, remote: RemoteSegment):
        self.bad(engine, TransferRequest(1, bytearray(5), remote, 0, 5))  # type: ignore[arg-type]

    def test_overlapping_reads(self, engine: TransferEngine, remote: RemoteSegment):
        landing = bytearray(100)
        first = TransferRequest(READ, landing, remote, 0, 50)
        self.bad(engine, first, TransferRequest(READ, memoryview(landing)[49:], remote, 0, 50))
        engine.transfer([first, TransferRequest(READ, memoryview(landing)[50:], remote, 0, 50)], 5)

    def test_nothing_moves_when_one_request_is_bad(
        self, engine: TransferEngine, remote: RemoteSegment, owner: SegmentProcess
    ):
        owner.poke(0, b"untouched")
        good = TransferRequest(WRITE, b"something", remote, 0, 9)
        self.bad(engine, good, TransferRequest(WRITE, b"x", remote, -1, 1))
        assert owner.peek(0, 9) == b"untouched"

    def test_too_many_requests(self, owner: SegmentProcess, transport: str):
        with TransferEngine(host_id=HOST_ID, config=EngineConfig(max_requests_per_batch=2)) as engine:
            remote = engine.open_segment(owner.descriptor, transport=transport)
            with pytest.raises(InvalidRequest):
                engine.submit(TransferBatch([TransferRequest(WRITE, b"x", remote, 0, 1)] * 3))

    def test_a_closed_engine(self, owner: SegmentProcess):
        engine = TransferEngine(host_id=HOST_ID)
        engine.close()
        with pytest.raises(InvalidRequest):
            engine.open_segment(owner.descriptor)

    def test_an_unknown_transport(self, engine: TransferEngine, owner: SegmentProcess):
        with pytest.raises(InvalidRequest):
            engine.open_segment(owner.descriptor, transport="pigeon")

    def test_writes_to_the_same_bytes_are_refused(self, engine: TransferEngine, remote: RemoteSegment):
        first = TransferRequest(WRITE, bytes(50), remote, 0, 50)
        for attempt in (
            lambda: engine.transfer([first, TransferRequest(WRITE, bytes(50), remote, 49, 50)], 1),
            lambda: engine.submit(TransferBatch([TransferRequest(WRITE, bytes(9), remote, 9, 1), first])),
        ):
            with pytest.raises(InvalidRequest, match="WRITEs of the batch overlap"):
                attempt()
        engine.transfer([first, TransferRequest(WRITE, bytes(50), remote, 50, 50)], 5)

    def test_also_through_two_sessions(self, engine: TransferEngine, remote: RemoteSegment, owner: SegmentProcess):
        other = engine.open_segment(owner.descriptor, SessionKey(9, bytes(16)), transport=remote.transport)
        batch = [TransferRequest(WRITE, bytes(2), each, 0, 2) for each in (remote, other)]
        with pytest.raises(InvalidRequest):
            engine.transfer(batch, 1)

    @pytest.mark.parametrize("field", ["length", "source_offset", "target_offset", "lease_id"])
    @pytest.mark.parametrize("value", [5.0, "5", None, [5]])
    def test_numbers_that_are_none(self, engine: TransferEngine, remote: RemoteSegment, field: str, value: object):
        good = TransferRequest(READ, bytearray(100), remote, 0, 5)
        self.bad(engine, replace(good, **{field: value}))  # type: ignore[arg-type]

    def test_numpy_s_numbers_are_numbers(self, engine: TransferEngine, remote: RemoteSegment):
        source, landing = b"numpy", bytearray(9)
        engine.transfer([TransferRequest(WRITE, source, remote, np.int64(7), np.uint8(5), np.intp(0))], 5)  # type: ignore[arg-type]
        engine.transfer([TransferRequest(READ, landing, remote, np.int64(7), np.int16(5), np.int32(2))], 5)  # type: ignore[arg-type]
        assert landing == b"\0\0numpy\0\0"

    @pytest.mark.parametrize("lease_id", [-1, 1 << 64])
    def test_leases_that_nobody_gave(self, engine: TransferEngine, remote: RemoteSegment, lease_id: int):
        self.bad(engine, TransferRequest(READ, bytearray(5), remote, 0, 5, lease_id=lease_id))

    @pytest.mark.parametrize("change", [{"name": ""}, {"name": "n" * 256}, {"generation": -1}, {"generation": 1 << 64}])
    def test_descriptors_of_nothing(self, engine: TransferEngine, owner: SegmentProcess, transport: str, change: Any):
        with pytest.raises(InvalidRequest):
            engine.open_segment(structs.replace(owner.descriptor, **change), transport=transport)

    @pytest.mark.parametrize("session_id", [-1, 1 << 64])
    def test_sessions_of_nobody(self, engine: TransferEngine, owner: SegmentProcess, transport: str, session_id: int):
        with pytest.raises(InvalidRequest):
            engine.open_segment(owner.descriptor, SessionKey(session_id, bytes(16)), transport)

    @pytest.mark.parametrize("change", [{"name": "another"}, {"generation": 99}])
    def test_unknown_segments(self, engine: TransferEngine, owner: SegmentProcess, transport: str, change: Any):
        with pytest.raises(NodeUnavailable):
            engine.open_segment(structs.replace(owner.descriptor, **change), transport=transport)

    @pytest.mark.parametrize(
        "address", ["", "no port", "127.0.0.1:none", "127.0.0.1:99999", "nowhere.invalid:1", "/not/there", "x" * 300]
    )
    def test_addresses_of_nobody(self, engine: TransferEngine, owner: SegmentProcess, transport: str, address: str):
        endpoint = structs.replace(owner.descriptor.endpoints_of(transport)[0], address=address)
        with pytest.raises(NodeUnavailable):
            engine.open_segment(structs.replace(owner.descriptor, endpoints=(endpoint,)), transport=transport)

    async def test_a_deadline_that_is_no_time(self, engine: TransferEngine, remote: RemoteSegment):
        requests = [TransferRequest(READ, bytearray(5), remote, 0, 5)]
        nan = float("nan")
        for attempt in (
            lambda: engine.transfer(requests, nan),
            lambda: engine.submit(TransferBatch(requests)).wait(nan),
        ):
            with pytest.raises(InvalidRequest):
                attempt()
        with pytest.raises(InvalidRequest):
            await engine.transfer_async(requests, nan)
        with pytest.raises(InvalidRequest):
            await engine.submit(TransferBatch(requests)).wait_async(nan)

    @pytest.mark.parametrize("deadline_s", [0.0, -1.0, -1e300, 1e-9, 1e300, float("inf")])
    async def test_any_other_deadline_is_kept_or_exceeded(
        self, engine: TransferEngine, remote: RemoteSegment, deadline_s: float
    ):
        requests = [TransferRequest(READ, bytearray(2 << 20), remote, at, 2 << 20) for at in (0, 2 << 20)]
        with contextlib.suppress(DeadlineExceeded):
            engine.transfer(requests[:1], deadline_s)
        with contextlib.suppress(DeadlineExceeded):
            engine.transfer(requests, deadline_s)
        with contextlib.suppress(DeadlineExceeded):
            await engine.transfer_async(requests, deadline_s)
        engine.transfer(requests, 10)

    @pytest.mark.parametrize("notify", ["text", 5, b"", b"x" * 5000])
    def test_notices_that_are_none(self, engine: TransferEngine, remote: RemoteSegment, notify: Any):
        self.bad(engine, TransferRequest(READ, bytearray(5), remote, 0, 5, notify=notify))


SIZE = 3 << 20


def checksum(data: Any) -> int:
    return xxhash.xxh3_64_intdigest(data)


class TestChecksums:
    @pytest.mark.parametrize("length", [1, 1000, SIZE])
    def test_what_arrives_unchanged_is_complete(self, engine: TransferEngine, remote: RemoteSegment, length: int):
        source, landing = random_bytes(length, 1), bytearray(length)
        engine.transfer([TransferRequest(WRITE, source, remote, 5, length, verify=True)], 10)
        engine.transfer([TransferRequest(READ, landing, remote, 5, length, verify=True)], 10)
        assert landing == source.tobytes()
        landing[:] = bytes(length)
        engine.transfer([TransferRequest(READ, landing, remote, 5, length, checksum=checksum(source))], 10)
        assert landing == source.tobytes()

    def test_a_wrong_checksum_fails_its_request_alone(self, engine: TransferEngine, remote: RemoteSegment):
        source, landing = random_bytes(SIZE, 2), bytearray(SIZE)
        engine.transfer([TransferRequest(WRITE, source, remote, 0, SIZE)], 10)
        half = SIZE // 2
        batch = [
            TransferRequest(READ, landing, remote, 0, half, checksum=checksum(source[:half]) ^ 1),
            TransferRequest(READ, landing, remote, half, half, half, checksum=checksum(source[half:])),
        ]
        handle = engine.submit(TransferBatch(batch))
        result = handle.wait(30)
        handle.check()
        assert isinstance(result.errors[0], ChecksumMismatch)
        assert result.errors[1] is None
        assert sum("corrupt" in line for line in handle.story(0)) == sum("post" in line for line in handle.story(0)) / 2
        assert sum(stats.num_mismatches for _, _, stats in remote.path_stats()) >= 2

    async def test_asyncio(self, engine: TransferEngine, remote: RemoteSegment):
        landing = bytearray(100)
        await engine.transfer_async([TransferRequest(READ, landing, remote, 0, 100, verify=True)], 5)
        with pytest.raises(ChecksumMismatch):
            await engine.transfer_async(
                [TransferRequest(READ, bytearray(100), remote, 0, 100, checksum=checksum(landing) ^ 1)], 5
            )

    def test_a_checksum_is_of_64_bits_and_for_reads(self, engine: TransferEngine, remote: RemoteSegment):
        with pytest.raises(InvalidRequest):
            engine.transfer([TransferRequest(WRITE, b"data", remote, 0, 4, checksum=1)], 1)
        with pytest.raises(InvalidRequest):
            engine.transfer([TransferRequest(READ, bytearray(4), remote, 0, 4, checksum=1 << 64)], 1)
