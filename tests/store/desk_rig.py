"""A node's decisions with desks and one client, over plain memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import xxhash

from tanghulu.eviction import make_policy
from tanghulu.runtime.clock import ManualClock
from tanghulu.store.node.state.holdings import Holding
from tanghulu.store.node.state.node_state import NodeState
from tanghulu.store.node.writes import write_buffers as desks
from tanghulu.store.node.writes.write_buffers import Desks
from tanghulu.store.protocol.types import Pin
from tanghulu.store.protocol.write_buffer import DeskWriter, Record
from tanghulu.transfer_engine.core.access import AccessTable
from tanghulu.types import ChunkKey

CAPACITY = 4 << 20
SESSION = 7


@dataclass
class Rig:
    """A node's decisions with desks, its memory, and one client."""

    capacity_bytes: int = CAPACITY
    clock: ManualClock = field(default_factory=ManualClock)
    displaced: list[Holding] = field(default_factory=list)

    def __post_init__(self) -> None:
        access = AccessTable(self.clock, 1000, self.capacity_bytes)
        access.open_session(SESSION, 4242)
        self.state = NodeState(self.capacity_bytes, access, lambda: make_policy("lru"), self.clock)
        self.memory = memoryview(bytearray(self.capacity_bytes + desks.AREA_BYTES))
        self.desks = Desks(self.state, self.memory, self.capacity_bytes, self.clock.now_s, self.displaced.append)
        self.state.desks = self.desks

    def open(self, value_bytes: int = 64, session_id: int = SESSION) -> DeskWriter:
        place = self.desks.grant(session_id, value_bytes)
        assert place is not None, "no desk"
        return DeskWriter(self.memory, place)

    def put(
        self, writer: DeskWriter, key: str, value: bytes = b"x" * 64, version: int = 1, pin: Pin = Pin.NONE
    ) -> None:
        place = writer.begin(len(value))
        assert place is not None, "no place"
        writer.fill(place, memoryview(value))
        writer.publish(Record(key, version, place, len(value), xxhash.xxh3_64_intdigest(value), pin))

    def held(self, key: str) -> bytes | None:
        chunk = self.state.find(ChunkKey(key))
        return None if chunk is None else bytes(self.memory[chunk.offset : chunk.offset + chunk.size_bytes])

    def later(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.desks.tick(self.clock.now_s())
        self.check()

    def check(self) -> None:
        self.state.check()
        self.desks.check()
