"""A node's decisions with write buffers and one client, over plain memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import xxhash

from tanghulu.eviction import make_policy
from tanghulu.store.node.state.node_state import make_node_state
from tanghulu.store.node.state.write_buffers import AREA_BYTES
from tanghulu.store.protocol.types import Pin
from tanghulu.store.protocol.write_buffer import BufferWriter, Record
from tanghulu.transfer_engine.core.access import AccessTable
from tanghulu.types import ChunkKey
from tests.virtual.clock import ManualClock

CAPACITY = 4 << 20
SESSION = 7


@dataclass
class Rig:
    """A node's decisions with write buffers, its memory, and one client."""

    capacity_bytes: int = CAPACITY
    clock: ManualClock = field(default_factory=ManualClock)

    def __post_init__(self) -> None:
        access = AccessTable(self.clock, 1000, self.capacity_bytes)
        access.open_session(SESSION, 4242)
        self.memory = memoryview(bytearray(self.capacity_bytes + AREA_BYTES))
        self.state = make_node_state(
            self.capacity_bytes,
            access,
            lambda: make_policy("lru"),
            self.clock,
            buffer_memory=(self.memory, self.capacity_bytes),
        )
        self.buffers = self.state.buffers

    def open(self, value_bytes: int = 64, session_id: int = SESSION) -> BufferWriter:
        place = self.state.grant_buffer(session_id, value_bytes)
        assert place is not None, "no write buffer"
        return BufferWriter(self.memory, place)

    def put(
        self, writer: BufferWriter, key: str, value: bytes = b"x" * 64, version: int = 1, pin: Pin = Pin.NONE
    ) -> None:
        place = writer.begin(len(value))
        assert place is not None, "no place"
        writer.fill(place, memoryview(value))
        writer.publish(Record(key, version, place, len(value), xxhash.xxh3_64_intdigest(value), pin))

    def held(self, key: str) -> bytes | None:
        chunk = self.state.chunks.find(ChunkKey(key))
        return None if chunk is None else bytes(self.memory[chunk.offset : chunk.offset + chunk.size_bytes])

    def later(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.state.tick_buffers(self.clock.now_s())
        self.check()

    def check(self) -> None:
        self.state.check()
