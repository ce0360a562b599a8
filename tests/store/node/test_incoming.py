"""Values that are received in place: what becomes of them when they have come, and when their connection ends."""

from __future__ import annotations

from typing import Any

import pytest

from tanghulu.errors import ChecksumMismatch, InvalidRequest, TanghuluError
from tanghulu.rpc.fast_server import PayloadSink, Peer
from tanghulu.store.node.state.chunk import Chunk, ChunkState
from tanghulu.store.node.writes.incoming import MAX_FRACTION, MAX_INCOMING_S
from tanghulu.store.protocol.checksums import NO_CHECKSUMS, Checksums
from tanghulu.store.protocol.messages import PutRequest
from tanghulu.types import ChunkKey
from tests.store.node.rig import CAPACITY, SUM, new, put
from tests.store.node.test_puts import Rig, results


class IncomingRig(Rig):
    """A node of 4 KiB that values arrive at."""

    def __init__(self) -> None:
        super().__init__()
        self.incoming = self.puts.incoming
        self.hung_up: list[Peer] = []
        for peer in (self.mine, self.other):
            peer.hang_up = lambda peer=peer: self.hung_up.append(peer)  # type: ignore[misc]

    def begin(self, key: str, size: int = 64, peer: Peer | None = None) -> Chunk | None:
        """The range of a value whose head is there."""
        chunk = self.incoming.begin(peer or self.mine, new(key, size))
        self.check()
        return chunk

    def sink(self, key: str, size: int = 64, sums: Checksums = SUM, announced: int | None = None) -> PayloadSink | None:
        """Where the payload of a PUT goes."""
        request = PutRequest([new(key, size).with_checksums(sums)], True, 1000)
        sink = self.service.receive(self.mine, request, size if announced is None else announced)
        self.check()
        return sink

    async def land(self, sink: PayloadSink | None, value: bytes = b"v" * 64) -> list[bool | TanghuluError]:
        """All of a value has come."""
        assert sink is not None
        sink.view[:] = value
        outcomes = await results(sink.landed())
        self.check()
        return outcomes

    def lose(self, peer: Peer) -> None:
        """Its connection ends."""
        for callback in peer.on_close:
            callback()
        self.check()

    def check(self) -> None:
        self.state.check()
        self.incoming.check()


@pytest.fixture
async def rig() -> IncomingRig:
    return IncomingRig()


async def test_a_value_that_has_come_is_announced_and_then_acknowledged(rig: IncomingRig) -> None:
    sink = rig.sink("k")
    assert rig.state.chunks.find(ChunkKey("k")) is None
    assert await rig.land(sink) == [False]
    chunk = rig.state.chunks.current(ChunkKey("k"))
    assert chunk is not None
    assert chunk.state is ChunkState.ANNOUNCING
    assert chunk.checksums == SUM
    assert bytes(rig.puts.bytes_of(chunk)) == b"v" * 64
    assert rig.state.reports.leader.urgent


async def test_checksums_are_computed_where_none_are_said_and_refused_where_they_do_not_fit(rig: IncomingRig) -> None:
    assert await rig.land(rig.sink("k", 150, NO_CHECKSUMS), b"abc" * 50) == [False]
    chunk = rig.state.chunks.current(ChunkKey("k"))
    assert chunk is not None
    assert rig.puts.verify(chunk)
    (refused,) = await rig.land(rig.sink("m", sums=Checksums(7, (1, 2))))
    assert isinstance(refused, InvalidRequest | ChecksumMismatch)
    assert rig.state.chunks.current(ChunkKey("m")) is None


async def test_a_connection_that_ends_leaves_nothing_of_what_was_coming(rig: IncomingRig) -> None:
    await rig.land(rig.sink("a"))
    assert rig.sink("b") is not None
    kept = rig.begin("c", peer=rig.other)
    assert kept is not None
    rig.lose(rig.mine)
    whole = rig.state.chunks.current(ChunkKey("a"))
    assert whole is not None
    assert rig.state.chunks.used_bytes == kept.size_bytes + whole.size_bytes


async def test_a_range_that_a_value_comes_to_is_nobody_elses_even_when_its_time_is_up(rig: IncomingRig) -> None:
    chunk = rig.begin("k")
    assert chunk is not None
    rig.incoming.tick()
    assert rig.hung_up == []
    rig.clock.advance(MAX_INCOMING_S)
    rig.state.expire(rig.clock.now_s())
    rig.incoming.tick()
    assert rig.hung_up == [rig.mine]
    for number in range(200):
        put(rig.state, new(f"other-{number}"))
    taken = (chunk.offset, chunk.size_bytes)
    assert taken not in [(c.offset, c.size_bytes) for c in rig.state.chunks.table if c is not chunk]
    rig.lose(rig.mine)
    assert chunk.state is ChunkState.GONE
    assert rig.hung_up == [rig.mine]


async def test_what_exists_is_not_received_in_place_and_put_says_so(rig: IncomingRig) -> None:
    put(rig.state, new("k"))
    assert rig.sink("k") is None
    answer = rig.service.put(rig.mine, PutRequest([new("k")], True, 1000), memoryview(bytes(64)))
    assert await results(answer) == [True]


async def test_a_value_of_another_size_than_was_said_is_refused(rig: IncomingRig) -> None:
    assert rig.sink("k", 65, announced=64) is None
    with pytest.raises(InvalidRequest):
        rig.service.put(rig.mine, PutRequest([new("k", 65)], True, 1000), memoryview(bytes(64)))
    assert rig.state.chunks.used_bytes == 0


async def test_all_that_is_coming_together_is_bounded(rig: IncomingRig) -> None:
    bound = int(CAPACITY * MAX_FRACTION)
    assert rig.begin("a", size=bound - 64) is not None
    assert rig.begin("b", size=128, peer=rig.other) is None
    assert rig.begin("c", size=64, peer=rig.other) is not None
    rig.lose(rig.mine)
    rig.incoming.end(rig.other)
    assert rig.begin("b", size=128, peer=rig.other) is not None


async def test_several_values_are_not_received_in_place(rig: IncomingRig) -> None:
    request: Any = PutRequest([new("a"), new("b")], True, 1000)
    assert rig.service.receive(rig.mine, request, 128) is None
