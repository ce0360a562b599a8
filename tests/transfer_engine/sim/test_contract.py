"""The contract suite's demands on the simulated transport: the tcp classes on packets, in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tanghulu.errors import DeadlineExceeded, InvalidRequest, NodeUnavailable, TanghuluError
from tanghulu.transfer_engine.core.admission import PeerAdmission
from tanghulu.transfer_engine.core.config import EngineConfig, TransportLimits
from tanghulu.transfer_engine.core.segment import NO_SESSION, Endpoint, MemorySegment, SegmentDescriptor
from tanghulu.transfer_engine.core.transport import ConnectContext
from tanghulu.transfer_engine.engine import (
    Opcode,
    RemoteSegment,
    TransferBatch,
    TransferCancelled,
    TransferEngine,
    TransferRequest,
    TransferState,
)
from tanghulu.transfer_engine.transports.tcp import transport as tcp
from tests.transfer_engine.segment_process import random_bytes
from tests.transfer_engine.sim.network import SimNetwork, Weather
from tests.virtual.clock import ManualClock

READ, WRITE = Opcode.READ, Opcode.WRITE
ADDRESS = "owner:1"
FINE = Weather(0.0, 0.0, packet_bytes=1 << 16, window_bytes=1 << 18)
BAD = Weather(0.05, 0.1, delay_max_s=0.05, packet_bytes=1000, window_bytes=4000)


class Wires:
    """One owner, one client, and the packets between them."""

    def __init__(self, weather: Weather, size_bytes: int, config: EngineConfig | None = None, seed: int = 1) -> None:
        self.clock = ManualClock(100.0)
        self.network = SimNetwork(self.clock, random.Random(seed), weather)
        self.segment = MemorySegment.create("sim", size_bytes)
        self.notices: list[bytes] = []
        self.reception = PeerAdmission(
            self.segment,
            None,
            generation=1,
            max_connections=64,
            soon=self.network.soon,
            on_notice=lambda session_id, data: self.notices.append(data),
        )
        self.reception.open = True
        self.network.listen(ADDRESS, self.reception)
        descriptor = SegmentDescriptor("sim", size_bytes, "elsewhere", 1, (Endpoint("tcp", ADDRESS),))
        # Virtual time stands still while somebody asks.
        config = config or EngineConfig(slice_deadline_s=1.0)
        self.engine = TransferEngine(host_id="client", clock=self.clock, config=config)
        host = self.network.host("client")
        context = ConnectContext(descriptor, NO_SESSION, config)
        self.remote = RemoteSegment(context, {"tcp": tcp.connect(context, host)}, self.clock)

    def at_event(self, number: int, act: Callable[[], None]) -> None:
        """Do something behind the ``number``-th event of the network."""
        left = [number]

        def after() -> None:
            left[0] -= 1
            if left[0] == 0:
                act()

        self.network.after_event = after

    def crash(self, *, silently: bool = False) -> None:
        if ADDRESS in self.network.ports:
            self.network.crash(ADDRESS, silently=silently)

    def close(self) -> None:
        self.network.after_event = lambda: None
        self.remote.check()
        self.remote.close()
        self.engine.close()
        self.segment.close()


@contextmanager
def wires(weather: Weather, size_bytes: int, config: EngineConfig | None = None, seed: int = 1) -> Iterator[Wires]:
    made = Wires(weather, size_bytes, config, seed)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("offset", [0, 4097])
@pytest.mark.parametrize("length", [1, 2, 4095, 65537, (1 << 20) + 1, 16 << 20])
def test_bytes_arrive(length: int, offset: int):
    with wires(FINE, length + offset) as sim:
        source, landing = random_bytes(length + 7, length), np.zeros(length + 9, np.uint8)
        sim.engine.transfer([TransferRequest(WRITE, source, sim.remote, offset, length, source_offset=7)], 60)
        assert sim.segment.view[offset:] == source[7:].tobytes()
        sim.engine.transfer([TransferRequest(READ, landing, sim.remote, offset, length, source_offset=5)], 60)
        assert np.array_equal(landing[5 : 5 + length], source[7:])
        assert not landing[:5].any()
        assert not landing[5 + length :].any()


@pytest.mark.slow
@pytest.mark.parametrize("opcode", Opcode)
def test_64_mib(opcode: Opcode):
    size = 64 << 20
    with wires(Weather(0.0, 0.0, packet_bytes=1 << 20, window_bytes=8 << 20), size) as sim:
        data = np.arange(size // 8, dtype=np.uint64).view(np.uint8)
        if opcode is WRITE:
            sim.engine.transfer([TransferRequest(WRITE, data, sim.remote, 0, size)], 600)
            assert np.array_equal(np.frombuffer(sim.segment.view, np.uint8), data)
        else:
            sim.segment.view[:] = data.data
            landing = np.zeros(size, np.uint8)
            sim.engine.transfer([TransferRequest(READ, landing, sim.remote, 0, size)], 600)
            assert np.array_equal(landing, data)


def test_many_ranges_both_ways_verified_and_notified():
    with wires(BAD, 64 << 10) as sim:
        data, landing = random_bytes(32 << 10, 1), bytearray(32 << 10)
        sim.segment.view[: 32 << 10] = random_bytes(32 << 10, 2).data
        before = bytes(sim.segment.view[: 32 << 10])
        places = range(0, 32 << 10, 512)
        batch = [TransferRequest(WRITE, data, sim.remote, (32 << 10) + at, 511, at, verify=True) for at in places]
        batch += [
            TransferRequest(READ, landing, sim.remote, at, 511, at, checksum=checksum(before[at : at + 511]))
            for at in places
        ]
        for number, each in enumerate(batch):
            each.notify = b"%d" % number
        handle = sim.engine.submit(TransferBatch(batch))
        assert handle.wait(600).ok
        handle.check()
        for at in places:
            assert landing[at : at + 512] == before[at : at + 511] + b"\0"
            assert sim.segment.view[(32 << 10) + at :][:511] == data[at : at + 511].tobytes()
        assert sorted(map(int, sim.notices)) == list(range(len(batch)))


def checksum(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data)


OPERATION = st.tuples(st.sampled_from([READ, WRITE]), st.integers(0, 3000), st.integers(1, 2000), st.booleans())


@settings(max_examples=40, deadline=None)
@given(
    operations=st.lists(OPERATION, min_size=1, max_size=12),
    seed=st.integers(0, 1 << 30),
    slice_bytes=st.integers(50, 3000),
)
def test_random_transfers_against_a_model(operations: list[tuple[Opcode, int, int, bool]], seed: int, slice_bytes: int):
    limits = {"tcp": TransportLimits(slice_bytes, 2 * slice_bytes, 4)}
    model = bytearray(5000)
    with wires(BAD, 5000, EngineConfig(limits=limits, retries_max=50, slice_deadline_s=2.0), seed) as sim:
        for opcode, offset, length, verify in operations:
            data = bytearray(random.Random(seed + offset).randbytes(length))
            if opcode is WRITE:
                model[offset : offset + length] = data
            sim.engine.transfer([TransferRequest(opcode, data, sim.remote, offset, length, verify=verify)], 600)
            assert data == model[offset : offset + length]
        assert sim.segment.view == model


class TestTheOwnerDies:
    """At every single event of a transfer: connect, hello, head, payload, reply, notice."""

    @pytest.mark.parametrize("silently", [False, True])
    @pytest.mark.parametrize("opcode", Opcode)
    def test_at_every_event(self, opcode: Opcode, silently: bool):
        outcomes = {self.one(opcode, number, silently) for number in range(1, 120)}
        assert outcomes == {"complete", "failed"}

    def one(self, opcode: Opcode, number: int, silently: bool) -> str:
        config = EngineConfig(
            limits={"tcp": TransportLimits(400, 800, 2)}, slice_deadline_s=0.3, retries_max=2, connect_timeout_s=0.3
        )
        with wires(Weather(0.0, 0.0, packet_bytes=300, window_bytes=700), 2000, config, number) as sim:
            data, content = bytearray(random_bytes(2000, 3).tobytes()), random_bytes(2000, 4).tobytes()
            sent = bytes(data)
            sim.segment.view[:] = content
            sim.at_event(number, lambda: sim.crash(silently=silently))
            request = TransferRequest(opcode, data, sim.remote, 0, 2000, verify=number % 2 == 0, notify=b"all of it")
            latest_s = sim.clock.now_s() + 5
            result = sim.engine.submit(TransferBatch([request])).wait(5)
            assert sim.clock.now_s() <= latest_s + 1e-6
            if not result.ok:
                assert isinstance(result.errors[0], TanghuluError)
                return "failed"
            assert data == (content if opcode is READ else sent)
            assert sim.segment.view == data
            assert sim.notices == [b"all of it"]
            return "complete"


@pytest.mark.parametrize("number", [1, 5, 20, 60])
def test_cancel_in_the_middle(number: int):
    with wires(Weather(0.0, 0.0, packet_bytes=300, window_bytes=700), 20_000) as sim:
        landing = bytearray(20_000)
        sim.segment.view[:] = b"\7" * 20_000
        handle = sim.engine.submit(TransferBatch([TransferRequest(READ, landing, sim.remote, 0, 20_000)]))
        for _ in range(number):
            handle.status()
            sim.network.run(sim.clock.now_s() + 0.001)
        assert handle.status() == [TransferState.OPEN]
        handle.cancel()
        left = bytes(landing)
        assert isinstance(handle.wait(1).errors[0], TransferCancelled)
        handle.check()
        sim.network.run(sim.clock.now_s() + 5)
        assert landing == left, "bytes landed after the cancel"
        sim.engine.transfer([TransferRequest(READ, landing, sim.remote, 0, 20_000)], 60)
        assert landing == sim.segment.view


def test_the_deadline_is_kept_to_the_microsecond():
    with wires(FINE, 100_000) as sim:
        sim.network.stalled.add(ADDRESS)
        for deadline_s in (0.01, 0.5, 3.0):
            before_s = sim.clock.now_s()
            with pytest.raises(DeadlineExceeded):
                sim.engine.transfer([TransferRequest(WRITE, bytes(100_000), sim.remote, 0, 100_000)], deadline_s)
            assert sim.clock.now_s() - before_s == pytest.approx(deadline_s, abs=2e-6)


def test_interleaved_batches():
    """Concurrency without threads: several batches are stepped in turns."""
    with wires(BAD, 80_000, EngineConfig(slice_deadline_s=5.0, retries_max=20)) as sim:
        data = [random_bytes(10_000, number) for number in range(8)]
        requests = [TransferRequest(WRITE, each, sim.remote, n * 10_000, 10_000) for n, each in enumerate(data)]
        handles = [sim.engine.submit(TransferBatch([each])) for each in requests]
        while not all(handle.done for handle in handles):
            for handle in handles:
                handle.status()
                handle.check()
            sim.network.run(sim.clock.now_s() + 0.005)
        assert all(handle.wait(0).ok for handle in handles)
        assert sim.segment.view == b"".join(each.tobytes() for each in data)


def test_bad_input():
    with wires(FINE, 100) as sim:
        for bad in (
            TransferRequest(READ, bytearray(10), sim.remote, 95, 10),
            TransferRequest(READ, bytearray(10), sim.remote, 0, 0),
            TransferRequest(READ, b"read-only", sim.remote, 0, 5),
            TransferRequest(WRITE, b"data", sim.remote, -1, 4),
        ):
            with pytest.raises(InvalidRequest):
                sim.engine.transfer([bad], 1)
        sim.crash()
        with pytest.raises(NodeUnavailable):
            sim.engine.transfer([TransferRequest(READ, bytearray(1), sim.remote, 0, 1)], 5)
