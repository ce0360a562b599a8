"""The long part of the contract: very large transfers, and owners that are killed at any moment."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import xxhash

from tanghulu.errors import NodeUnavailable
from tanghulu.transfer_engine.engine import EngineConfig, Opcode, TransferBatch, TransferEngine, TransferRequest
from tests.transfer_engine.segment_process import HOST_ID, SegmentProcess

READ, WRITE = Opcode.READ, Opcode.WRITE
LARGE = 256 << 20
ODD = 4099

pytestmark = pytest.mark.slow


@pytest.fixture(params=["shm", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def large() -> Iterator[SegmentProcess]:
    with SegmentProcess(size_bytes=LARGE + ODD) as process:
        yield process


def test_256_mib_both_ways(large: SegmentProcess, transport: str):
    data = np.arange(LARGE // 8, dtype=np.uint64).view(np.uint8)
    expected = xxhash.xxh3_64_intdigest(data)
    with TransferEngine(host_id=HOST_ID) as engine:
        remote = engine.open_segment(large.descriptor, transport=transport)
        large.watch_notices(ODD, LARGE)
        engine.transfer([TransferRequest(WRITE, data, remote, ODD, LARGE, notify=b"all")], 60)
        assert large.take_notices() == [(0, b"all", expected)]
        landing = np.zeros(LARGE, np.uint8)
        engine.transfer([TransferRequest(READ, landing, remote, ODD, LARGE, checksum=expected)], 60)
        assert np.array_equal(landing, data)


@pytest.mark.parametrize("opcode", Opcode)
def test_an_owner_that_is_killed_at_any_moment(transport: str, opcode: Opcode):
    """Whatever is reported complete was there in time; everything else is a typed error, soon."""
    size = 32 << 20
    chance = random.Random(7)
    outcomes: set[bool] = set()
    for number in range(7):
        config = EngineConfig(slice_deadline_s=0.5, retries_max=1)
        with SegmentProcess(size_bytes=size) as mortal, TransferEngine(host_id=HOST_ID, config=config) as engine:
            remote = engine.open_segment(mortal.descriptor, transport=transport)
            mortal.poke(0, b"\x11" * size)
            data = bytearray(b"\x22" * size)
            delay_s = 0.0 if number == 0 else 600.0 if number == 1 else chance.uniform(0, 0.04)
            killer = threading.Timer(delay_s, mortal.process.kill)
            batch = [TransferRequest(opcode, data, remote, at, size // 4, at) for at in range(0, size, size // 4)]
            batch[0].notify = b"first"
            killer.start()
            if number == 0:
                killer.join()  # the first is killed before, the second not at all
            start_s = time.monotonic()
            result = engine.submit(TransferBatch(batch)).wait(20)
            assert time.monotonic() - start_s < 10
            killer.cancel()
            killer.join()
            for request, error in zip(batch, result.errors, strict=True):
                assert error is None or isinstance(error, NodeUnavailable), repr(error)
                if error is None and opcode is READ:
                    part = data[request.source_offset : request.source_offset + request.length]
                    assert part == b"\x11" * request.length
            outcomes.add(result.ok)
    assert outcomes == {True, False}
