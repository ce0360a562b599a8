"""Who acts in the simulated cluster: nodes with segments, clients that put and get, clients that map memory.

Each is a model around the production classes, and states what must hold of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from tanghulu.errors import (
    ChecksumMismatch,
    DeadlineExceeded,
    LeaseExpired,
    NodeUnavailable,
    Overloaded,
    TransferFailed,
)
from tanghulu.transfer_engine.core.access import AccessTable, Freed
from tanghulu.transfer_engine.core.admission import PeerAdmission
from tanghulu.transfer_engine.core.config import EngineConfig, TransportLimits
from tanghulu.transfer_engine.core.segment import Endpoint, MemorySegment, SegmentDescriptor
from tanghulu.transfer_engine.core.slices import Opcode
from tanghulu.transfer_engine.core.transport import ConnectContext
from tanghulu.transfer_engine.engine import (
    RemoteSegment,
    TransferBatch,
    TransferEngine,
    TransferHandle,
    TransferRequest,
)
from tanghulu.transfer_engine.transports.tcp import transport as tcp
from tests.transfer_engine.sim.network import SimHost

if TYPE_CHECKING:
    from tests.transfer_engine.sim.world import World

SLOT_BYTES = 1024
NUM_SLOTS = 10
POISON = b"\xdd" * SLOT_BYTES
TICK_S = 0.1
TICKS_PER_SWEEP = 7
CONFIG = EngineConfig(
    limits={
        "tcp": TransportLimits(slice_bytes=200, window_bytes=500, window_slices=3),
        "shm": TransportLimits(1, 1, 1),
    },
    streams_per_peer=2,
    tcp_devices=("a", "b"),
    retries_max=3,
    slice_deadline_s=0.4,
    pause_after_errors=2,
    pause_s=0.1,
    pause_max_s=1.0,
    max_links_per_peer=3,
    connect_timeout_s=0.5,
)
#: What a transfer may fail with in this weather.
EXPECTED = (ChecksumMismatch, DeadlineExceeded, LeaseExpired, NodeUnavailable, Overloaded, TransferFailed)


class Violation(AssertionError):
    """An invariant does not hold."""


def demand(condition: bool, text: str) -> None:
    if not condition:
        raise Violation(text)


class SlotState(Enum):
    FREE = "free"
    WRITING = "writing"
    KEPT = "kept"


@dataclass(eq=False)
class Attempt:
    """One batch's bytes for (part of) one slot."""

    number: int
    process: str
    payload: bytes
    verified: bool = False
    ended: str = ""  # "", "ok" or "failed"
    ended_number: int = 1 << 60  # attempts above it were made afterwards


@dataclass(eq=False)
class Slot:
    index: int
    state: SlotState = SlotState.FREE
    content: bytes = POISON
    leases: set[int] = field(default_factory=set)
    attempts: list[Attempt] = field(default_factory=list)
    mapped_by: str = ""

    @property
    def offset(self) -> int:
        return self.index * SLOT_BYTES


class SimNode:
    """One process that owns a segment; a model of a store node around the production classes."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.address = f"{name}:1"
        self.generation = 0
        self.up = False
        self.start()

    def start(self) -> None:
        world = self.world
        self.generation += 1
        self.up = True
        self.segment = MemorySegment.create(self.name, SLOT_BYTES * NUM_SLOTS)
        self.segment.view[:] = POISON * NUM_SLOTS
        self.base = np.frombuffer(self.segment.view, np.uint8).__array_interface__["data"][0]
        self.access = AccessTable(world.clock, 1000, 2 * SLOT_BYTES, random_bytes=Random(self.name).randbytes)
        self.slots = [Slot(index) for index in range(NUM_SLOTS)]
        self.newest_served: dict[str, int] = {}
        self.reception = PeerAdmission(
            self.segment,
            self.access,
            generation=self.generation,
            max_connections=64,
            soon=world.network.soon,
            on_freed=self.freed,
            on_notice=self.noticed,
        )
        self.reception.piece_bytes = 300
        self.reception.open = True
        world.network.listen(self.address, self.reception)
        self._tick(self.generation, 0)

    def crash(self) -> None:
        self.up = False
        self.world.network.crash(self.address, silently=self.world.chance.random() < 0.3)
        self.world.network.stalled.discard(self.address)
        self.segment.close()

    @property
    def descriptor(self) -> SegmentDescriptor:
        endpoints = (Endpoint("tcp", self.address),)
        return SegmentDescriptor(self.name, SLOT_BYTES * NUM_SLOTS, "elsewhere", self.generation, endpoints)

    def _tick(self, generation: int, number: int) -> None:
        if self.up and self.generation == generation:
            self.freed(self.access.expire(self.world.clock.now_s()))
            if self.world.chance.random() < 0.4:
                self._evict()
            if number % TICKS_PER_SWEEP == 0 and self.address not in self.world.network.stalled:
                self.reception.cut_stalled()
            self.world.network.later(TICK_S, lambda: self._tick(generation, number + 1))

    def _evict(self) -> None:
        kept = [slot for slot in self.slots if slot.state is SlotState.KEPT and not slot.leases]
        if kept:
            self.clear(self.world.chance.choice(kept))

    def freed(self, freed: Sequence[Freed]) -> None:
        for each in freed:
            slot = self.slots[each.offset // SLOT_BYTES]
            slot.leases.discard(each.lease_id)
            if slot.state is SlotState.WRITING and not slot.leases:
                self.clear(slot)

    def clear(self, slot: Slot) -> None:
        """Give the slot's range to nobody: its bytes are overwritten at once."""
        slot.state, slot.content, slot.mapped_by = SlotState.FREE, POISON, ""
        slot.attempts = []
        self.segment.view[slot.offset : slot.offset + SLOT_BYTES] = POISON

    def reserve(self, session_id: int, lease_ms: int, *, mapped_by: str = "") -> Slot | None:
        free = [slot for slot in self.slots if slot.state is SlotState.FREE]
        if not free:
            self._evict()
            free = [slot for slot in self.slots if slot.state is SlotState.FREE]
        if not free:
            return None
        slot = self.world.chance.choice(free)
        try:
            lease = self.access.grant(session_id, slot.offset, SLOT_BYTES, Opcode.WRITE, lease_ms, shm=bool(mapped_by))
        except Overloaded:
            return None
        slot.state, slot.mapped_by = SlotState.WRITING, mapped_by
        slot.leases = {lease}
        return slot

    def commit(self, slot: Slot, lease: int, payload: bytes) -> None:
        if lease in slot.leases and self.access.is_active(lease):  # type: ignore[arg-type]
            here = bytes(self.segment.view[slot.offset : slot.offset + len(payload)])
            demand(here == payload, f"{self.name} slot {slot.index}: reported as arrived, but other bytes are there")
            slot.content = bytes(self.segment.view[slot.offset : slot.offset + SLOT_BYTES])
            slot.state = SlotState.KEPT
        self.freed(self.access.release(lease))  # type: ignore[arg-type]

    def noticed(self, session_id: int, data: bytes) -> None:
        """A client's notice has come."""
        demand(self.up, f"{self.name} is told something while it is down")
        self.world.noticed(self, data)

    def landing(self, offset: int, data: bytes) -> None:
        """Bytes of a WRITE are about to be put into the segment."""
        slot = self.slots[offset // SLOT_BYTES]
        where = f"{self.name} slot {slot.index} [{offset}, +{len(data)})"
        demand(
            slot.state is SlotState.WRITING and not slot.mapped_by, f"{where}: bytes land in a {slot.state.value} slot"
        )
        at = offset - slot.offset
        found = [each for each in reversed(slot.attempts) if each.payload[at : at + len(data)] == data]
        demand(bool(found), f"{where}: bytes that nobody sent there")
        demand(found[0].ended != "ok", f"{where}: a late duplicate of a batch that has ended complete")
        self.served(found[0], where)

    def served(self, attempt: Attempt, where: str) -> None:
        """Something of the attempt, bytes or a notice, takes effect here now."""
        newest = self.newest_served.get(attempt.process, 0)
        demand(newest < attempt.ended_number, f"{where}: an ended batch lands behind a later one")
        self.newest_served[attempt.process] = max(newest, attempt.number)

    def check(self) -> None:
        if not self.up:
            return
        self.reception.check()
        for slot in self.slots:
            if slot.state is not SlotState.WRITING:
                here = self.segment.view[slot.offset : slot.offset + SLOT_BYTES]
                demand(
                    here.tobytes() == slot.content, f"{self.name} slot {slot.index} ({slot.state.value}) has changed"
                )


@dataclass
class Flight:
    """A batch of a stepped client."""

    handle: TransferHandle
    until_s: float
    ended: Callable[[bool], None]


class SimClient:
    """One process that puts and gets."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.flights: list[Flight] = []
        self.start()

    def start(self) -> None:
        self.process = f"{self.name} {self.world.next_number()}"
        self.host: SimHost = self.world.network.host(self.name)
        self.engine = TransferEngine(host_id=self.name, clock=self.world.clock, config=CONFIG)
        self.remotes: dict[tuple[str, int], RemoteSegment] = {}
        self.sessions: dict[tuple[str, int], int] = {}

    def crash(self) -> None:
        """Its sockets close, what they sent travels on; the nodes learn of it a little later."""
        flights = list(self.flights)
        self.close()
        for flight in flights:
            flight.ended(False)
        for (name, generation), session_id in self.sessions.items():
            self.world.end_session(self.world.node(name), generation, session_id)
        self.start()

    def close(self) -> None:
        while self.flights:
            self.flights.pop().handle.cancel()
        for remote in self.remotes.values():
            remote.close()
        self.engine.close()

    def open(self, node: SimNode) -> tuple[RemoteSegment, int]:
        key = (node.name, node.generation)
        if key not in self.remotes:
            session_id = self.sessions[key] = self.world.next_number()
            session = node.access.open_session(session_id, None)
            context = ConnectContext(node.descriptor, session, CONFIG)
            self.remotes[key] = RemoteSegment(context, {"tcp": tcp.connect(context, self.host)}, self.world.clock)
        return self.remotes[key], self.sessions[key]

    # --- operations: (requests, what to do at the end)

    def put(
        self, node: SimNode, lease_ms: int | None = None
    ) -> tuple[list[TransferRequest], Callable[[bool], None]] | None:
        chance = self.world.chance
        remote, session_id = self.open(node)
        slot = node.reserve(session_id, lease_ms or chance.choice([200, 3000, 6000]))
        if slot is None:
            return None
        (lease,) = slot.leases
        payload = chance.randbytes(chance.randint(1, SLOT_BYTES))
        attempt = Attempt(self.world.next_number(), self.process, payload, verified=chance.random() < 0.5)
        slot.attempts.append(attempt)
        requests = self.world.parts(Opcode.WRITE, payload, remote, slot.offset, lease, verify=attempt.verified)

        def on_notice(where: str, request: TransferRequest) -> None:
            node.served(attempt, where)
            if slot.state is SlotState.WRITING and attempt in slot.attempts:
                start, end = request.source_offset, request.source_offset + request.length
                here = bytes(node.segment.view[slot.offset + start : slot.offset + end])
                demand(here == payload[start:end], f"{where}: told of bytes that are not there")

        told = self.world.expect_notices(requests, on_notice)

        def ended(ok: bool) -> None:
            attempt.ended, attempt.ended_number = "ok" if ok else "failed", self.world.next_number()
            demand(not ok or told(), f"{self.name} wrote {node.name} slot {slot.index}: its owner was not told")
            if not node.up or node.generation != remote.descriptor.generation:
                return
            if ok:
                node.commit(slot, lease, payload)
            else:
                node.freed(node.access.release(lease))  # type: ignore[arg-type]

        return requests, ended

    def get(self, node: SimNode) -> tuple[list[TransferRequest], Callable[[bool], None]] | None:
        kept = [slot for slot in node.slots if slot.state is SlotState.KEPT]
        if not kept:
            return None
        chance = self.world.chance
        remote, session_id = self.open(node)
        slot = chance.choice(kept)
        lease_ms = chance.choice([100, 1000, 5000])
        lease = node.access.grant(session_id, slot.offset, SLOT_BYTES, Opcode.READ, lease_ms)  # type: ignore[arg-type]
        slot.leases.add(lease)
        content, landing = slot.content, bytearray(SLOT_BYTES)
        kind = chance.choice(["plain", "plain", "verify", "checksum"])
        requests = self.world.parts(Opcode.READ, landing, remote, slot.offset, lease, verify=kind == "verify")
        if kind == "checksum":
            for each in requests:
                part = content[each.source_offset : each.source_offset + each.length]
                each.checksum = xxhash.xxh3_64_intdigest(part)
        if kind != "plain":
            self.world.expect_taint(landing)

        def on_notice(where: str, request: TransferRequest) -> None:
            start, end = request.source_offset, request.source_offset + request.length
            demand(landing[start:end] == content[start:end], f"{where}: told of bytes that were not read")

        told = self.world.expect_notices(requests, on_notice)

        def ended(ok: bool) -> None:
            demand(not ok or told(), f"{self.name} read {node.name} slot {slot.index}: its owner was not told")
            demand(not ok or landing == content, f"{self.name} read {node.name} slot {slot.index}: other bytes arrived")
            self.world.guard(landing)
            if node.up and node.generation == remote.descriptor.generation:
                node.freed(node.access.release(lease))

        return requests, ended

    # --- stepping

    def launch(self, node: SimNode) -> None:
        chance = self.world.chance
        made = (self.put if chance.random() < 0.6 else self.get)(node)
        if made is not None and len(self.flights) < 3:
            handle = self.engine.submit(TransferBatch(made[0]))
            self.flights.append(Flight(handle, self.world.clock.now_s() + chance.uniform(0.02, 3), made[1]))
        elif made is not None:
            made[1](False)

    def turn(self) -> None:
        """What this process does when it runs."""
        now_s = self.world.clock.now_s()
        for flight in list(self.flights):
            flight.handle.status()
            if flight.handle.done or now_s >= flight.until_s:
                self.flights.remove(flight)
                self.world.finish(flight.handle, flight.ended)

    def check(self) -> None:
        for flight in self.flights:
            flight.handle.check()
        for remote in self.remotes.values():
            if not remote.closed:
                remote.check()
