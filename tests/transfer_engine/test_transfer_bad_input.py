"""What every transport refuses alike, with a typed error and at once: the contract's part about bad input."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from segment_process import HOST_ID, SEGMENT_BYTES, SegmentProcess

from tanghulu.errors import DeadlineExceeded, InvalidRequest, NodeUnavailable
from tanghulu.transfer_engine.engine import (
    EngineConfig,
    Opcode,
    RemoteSegment,
    TransferBatch,
    TransferEngine,
    TransferRequest,
)

READ, WRITE = Opcode.READ, Opcode.WRITE


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
        other = engine.open_segment(owner.descriptor, session_id=9, transport=remote.transport)
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
            engine.open_segment(replace(owner.descriptor, **change), transport=transport)

    @pytest.mark.parametrize("session_id", [-1, 1 << 64])
    def test_sessions_of_nobody(self, engine: TransferEngine, owner: SegmentProcess, transport: str, session_id: int):
        with pytest.raises(InvalidRequest):
            engine.open_segment(owner.descriptor, session_id, transport)

    @pytest.mark.parametrize("change", [{"name": "another"}, {"generation": 99}])
    def test_unknown_segments(self, engine: TransferEngine, owner: SegmentProcess, transport: str, change: Any):
        with pytest.raises(NodeUnavailable):
            engine.open_segment(replace(owner.descriptor, **change), transport=transport)

    @pytest.mark.parametrize(
        "address", ["", "no port", "127.0.0.1:none", "127.0.0.1:99999", "nowhere.invalid:1", "/not/there", "x" * 300]
    )
    def test_addresses_of_nobody(self, engine: TransferEngine, owner: SegmentProcess, transport: str, address: str):
        endpoint = replace(owner.descriptor.endpoints_of(transport)[0], address=address)
        with pytest.raises(NodeUnavailable):
            engine.open_segment(replace(owner.descriptor, endpoints=(endpoint,)), transport=transport)

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
