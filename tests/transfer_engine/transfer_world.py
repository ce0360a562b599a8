"""A little cluster in virtual time on the production classes, and what must hold in it after every event.

Nodes own segments through AccessTable and Reception; clients put and get through TransferEngine, RemoteSegment,
TransferHandle and the tcp transport, on a SimNetwork. One client waits for its batches (``TransferHandle.wait`` and
``TransferEngine.transfer`` as they are); the others are stepped, several batches at once; one maps memory and touches
it whenever it likes. Everything is drawn from one seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from tanghulu.clock import ManualClock
from tanghulu.errors import (
    DeadlineExceeded,
    LeaseExpired,
    NodeUnavailable,
    Overloaded,
    TransferFailed,
)
from tanghulu.transfer_engine.access import AccessTable
from tanghulu.transfer_engine.config import EngineConfig, TransportLimits
from tanghulu.transfer_engine.engine import (
    RemoteSegment,
    TransferBatch,
    TransferEngine,
    TransferHandle,
    TransferRequest,
)
from tanghulu.transfer_engine.leases import Freed
from tanghulu.transfer_engine.opcode import Opcode
from tanghulu.transfer_engine.reception import Reception
from tanghulu.transfer_engine.segment import Endpoint, MemorySegment, SegmentDescriptor
from tanghulu.transfer_engine.sim_network import SimHost, SimNetwork, Weather
from tanghulu.transfer_engine.sim_transport import SimTransport

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
EXPECTED = (DeadlineExceeded, LeaseExpired, NodeUnavailable, Overloaded, TransferFailed)


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
        self.access = AccessTable(world.clock, 1000, 2 * SLOT_BYTES)
        self.slots = [Slot(index) for index in range(NUM_SLOTS)]
        self.newest_served: dict[str, int] = {}
        self.reception = Reception(
            self.segment,
            self.access,
            generation=self.generation,
            max_connections=64,
            soon=world.network.soon,
            on_freed=self.freed,
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
        attempt = found[0]
        demand(attempt.ended != "ok", f"{where}: a late duplicate of a batch that has ended complete")
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
                demand(here == slot.content, f"{self.name} slot {slot.index} ({slot.state.value}) has changed")


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
            node.access.open_session(session_id, None)
            self.remotes[key] = RemoteSegment(
                node.descriptor, session_id, ["tcp"], CONFIG, self.world.clock, None, self.host
            )
        return self.remotes[key], self.sessions[key]

    # --- operations: (requests, what to do at the end)

    def put(
        self, node: SimNode, lease_ms: int | None = None
    ) -> tuple[list[TransferRequest], Callable[[bool], None]] | None:
        chance = self.world.chance
        remote, session_id = self.open(node)
        slot = node.reserve(session_id, lease_ms or chance.choice([200, 1000, 5000]))
        if slot is None:
            return None
        (lease,) = slot.leases
        payload = chance.randbytes(chance.randint(1, SLOT_BYTES))
        attempt = Attempt(self.world.next_number(), self.process, payload)
        slot.attempts.append(attempt)
        requests = self.world.parts(Opcode.WRITE, payload, remote, slot.offset, lease)

        def ended(ok: bool) -> None:
            attempt.ended, attempt.ended_number = "ok" if ok else "failed", self.world.next_number()
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
        requests = self.world.parts(Opcode.READ, landing, remote, slot.offset, lease)

        def ended(ok: bool) -> None:
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


class Mapper:
    """A client that maps a node's memory, and cannot be refused anything while it lives."""

    def __init__(self, world: World, node: SimNode) -> None:
        self.world, self.node = world, node
        self.generation = node.generation
        self.session_id = world.next_number()
        self.name = f"mapper-{self.session_id}"
        self.slots: dict[int, Slot] = {}
        self.lost = False
        node.access.open_session(self.session_id, pid=self.session_id)

    @property
    def over(self) -> bool:
        return not self.node.up or self.node.generation != self.generation

    def reserve(self) -> None:
        if not self.lost:
            slot = self.node.reserve(self.session_id, 300, mapped_by=self.name)
            if slot is not None:
                (lease,) = slot.leases
                self.slots[lease] = slot

    def touch(self) -> None:
        for slot in self.slots.values():
            demand(slot.mapped_by == self.name, f"{self.node.name} slot {slot.index}: reused while it is mapped")
            at = slot.offset + self.world.chance.randrange(SLOT_BYTES)
            self.node.segment.view[at] = self.world.chance.randrange(256)

    def release(self) -> None:
        if self.slots:
            lease, _ = self.slots.popitem()
            self.node.freed(self.node.access.release(lease))  # type: ignore[arg-type]

    def lose(self) -> None:
        """Its connection is gone, the process lives."""
        self.lost = True
        self.node.freed(self.node.access.close_session(self.session_id))

    def exit(self) -> None:
        self.slots.clear()
        self.node.freed(self.node.access.session_exited(self.session_id))


class World:
    """One run. ``run()`` raises Violation, or an assertion of the classes, where something is wrong."""

    def __init__(self, seed: int, *, num_operations: int = 8) -> None:
        self.seed = seed
        self.num_operations = num_operations
        self.chance = random.Random(seed)
        self.clock = ManualClock(100.0)
        weather = Weather(
            loss=self.chance.choice([0.0, 0.02, 0.15]),
            duplicate=self.chance.choice([0.0, 0.1]),
            delay_max_s=self.chance.choice([0.002, 0.02, 0.2]),
            resend_s=self.chance.choice([0.05, 0.3]),
            window_bytes=self.chance.choice([100, 300, 3000]),
        )
        self.network = SimNetwork(self.clock, self.chance, weather)
        self.network.on_received = self._received
        self.network.after_event = self._after_event
        self._number = 0
        self._guarded: list[tuple[bytearray, bytes]] = []
        self.num_events = self.num_complete = self.num_failed = 0
        self.nodes = [SimNode(self, name) for name in ("north", "south")]
        self.clients = [SimClient(self, name) for name in ("cora", "dora")]
        self.waiter = SimClient(self, "wanda")
        self.mappers: list[Mapper] = []
        self._disturbing = True

    def next_number(self) -> int:
        self._number += 1
        return self._number

    def node(self, name: str) -> SimNode:
        return next(node for node in self.nodes if node.name == name)

    # --- the run

    def run(self) -> None:
        try:
            self.network.later(0.0, self._disturb)
            for client in self.clients:
                self._turns(client)
            for _ in range(self.num_operations):
                self.network.run(self.clock.now_s() + self.chance.uniform(0, 0.3))
                self._operate()
            self._heal()
        finally:
            for node in self.nodes:
                node.segment.close()
            for client in [*self.clients, self.waiter]:
                client.close()

    def _operate(self) -> None:
        """The waiting client does one operation, through the doors that callers use."""
        up = [node for node in self.nodes if node.up]
        if not up:
            return
        node = self.chance.choice(up)
        self._maybe_greet(node)
        made = (self.waiter.put if self.chance.random() < 0.6 else self.waiter.get)(node) if node.up else None
        if made is not None:
            self._transfer(*made, self.chance.choice([0.05, 0.5, 3.0]))

    def _maybe_greet(self, node: SimNode) -> None:
        remote, _ = self.waiter.open(node)
        if self.chance.random() < 0.3:
            try:
                remote.greet(0.5, self.clock)
            except NodeUnavailable:
                pass

    def _transfer(self, requests: list[TransferRequest], ended: Callable[[bool], None], deadline_s: float) -> bool:
        latest_s = self.clock.now_s() + deadline_s + 1e-6
        if self.chance.random() < 0.5:
            handle = self.waiter.engine.submit(TransferBatch(requests))
            handle.wait(deadline_s)
            demand(self.clock.now_s() <= latest_s, f"a transfer outlived its deadline of {deadline_s} s")
            return self.finish(handle, ended)
        try:
            self.waiter.engine.transfer(requests, deadline_s)
            ok = True
        except EXPECTED:
            ok = False
        demand(self.clock.now_s() <= latest_s, f"a transfer outlived its deadline of {deadline_s} s")
        self._count(ok)
        ended(ok)
        return ok

    def finish(self, handle: TransferHandle, ended: Callable[[bool], None]) -> bool:
        result = handle.wait(0)
        demand(handle.done, "a batch whose deadline has come goes on")
        for index, error in enumerate(result.errors):
            demand(error is None or isinstance(error, EXPECTED), f"{error!r} is no answer to bad weather")
            self._check_attempts(handle.story(index))
        self._count(result.ok)
        ended(result.ok)
        return result.ok

    def _check_attempts(self, story: list[str]) -> None:
        posts: dict[str, int] = {}
        for line in story:
            _, _, slice_id, what, *_ = line.split()
            posts[slice_id] = posts.get(slice_id, 0) + (what == "post")
        most = max(posts.values(), default=0)
        demand(most <= 1 + CONFIG.retries_max, f"a slice was tried {most} times:\n" + "\n".join(story))

    def _count(self, ok: bool) -> None:
        self.num_complete += ok
        self.num_failed += not ok

    def parts(
        self, opcode: Opcode, memory: bytes | bytearray, remote: RemoteSegment, offset: int, lease: int
    ) -> list[TransferRequest]:
        """One transfer as one to three requests."""
        size = len(memory)
        cuts = sorted({0, size, *(self.chance.randint(0, size) for _ in range(self.chance.randint(0, 2)))})
        return [
            TransferRequest(opcode, memory, remote, offset + start, end - start, source_offset=start, lease_id=lease)
            for start, end in zip(cuts, cuts[1:], strict=False)
        ]

    # --- what happens by itself

    def _turns(self, client: SimClient) -> None:
        up = [node for node in self.nodes if node.up]
        if up and self._disturbing and self.chance.random() < 0.1:
            client.launch(self.chance.choice(up))
        client.turn()
        self.network.later(self.chance.choice([0.005, 0.02, 0.1]), lambda: self._turns(client))

    def _disturb(self) -> None:
        if not self._disturbing:
            return
        acts = [self._partition, self._partition, self._stall, self._crash_client, self._crash_node]
        acts += [self._map, self._map, self._reset, self._reset]
        self.chance.choice(acts)()
        self.network.later(self.chance.uniform(0.05, 1.0), self._disturb)

    def _partition(self) -> None:
        host = self.chance.choice(["cora", "dora", "wanda"])
        for device in self.chance.choice([("a",), ("b",), ("a", "b")]):
            self.network.cut_links.add((host, device))
            heal_s = self.chance.uniform(0.05, 2.0)
            self.network.later(heal_s, lambda device=device: self.network.cut_links.discard((host, device)))  # type: ignore[misc]

    def _stall(self) -> None:
        node = self.chance.choice(self.nodes)
        if node.up:
            self.network.stalled.add(node.address)
            self.network.later(self.chance.uniform(0.05, 1.5), lambda: self.network.wake(node.address))

    def _reset(self) -> None:
        """A connection breaks in the middle, seen by both ends."""
        transports = [each for found in self.network.transports.values() for each in found]
        if transports:
            transport = self.chance.choice(transports)
            transport.abort()

    def _crash_client(self) -> None:
        self.chance.choice(self.clients).crash()

    def _crash_node(self) -> None:
        node = self.chance.choice(self.nodes)
        if node.up and self.chance.random() < 0.5:
            node.crash()
            self.network.later(self.chance.uniform(0.05, 1.0), node.start)

    def _map(self) -> None:
        self.mappers = [each for each in self.mappers if not each.over]
        up = [node for node in self.nodes if node.up]
        if up and len(self.mappers) < 3:
            self.mappers.append(Mapper(self, self.chance.choice(up)))
        for mapper in list(self.mappers):
            act = self.chance.choice(["reserve", "reserve", "touch", "touch", "release", "lose", "exit"])
            getattr(mapper, act)()
            if act == "exit":
                self.mappers.remove(mapper)

    def end_session(self, node: SimNode, generation: int, session_id: int) -> None:
        def end() -> None:
            if node.up and node.generation == generation:
                node.freed(node.access.close_session(session_id))

        self.network.later(self.chance.uniform(0, 0.5), end)

    # --- the end: when the weather is fine again everything works, and nothing is held

    def _heal(self) -> None:
        self._disturbing = False
        self.network.weather.loss, self.network.weather.delay_max_s = 0.0, 0.005
        self.network.run(self.clock.now_s() + 3.2)
        self.network.cut_links.clear()
        for node in self.nodes:
            if not node.up:
                node.start()
            self.network.wake(node.address)
        self.network.run(self.clock.now_s() + 5.5)
        for mapper in self.mappers:
            if not mapper.over:
                mapper.exit()
        for client in self.clients:
            demand(not client.flights, f"{client.name} has batches in flight after all deadlines")
        for node in self.nodes:
            made = self.waiter.put(node, lease_ms=60_000)
            demand(made is not None, f"{node.name} has no slot left")
            assert made is not None
            demand(self._transfer(*made, 30.0), f"in fine weather {node.name} cannot be written")
        self.network.run(self.clock.now_s() + 2.0)
        self._check_everything()
        for node in self.nodes:
            demand(node.access.num_leases == 0, f"{node.access!r} after everybody has let go")

    # --- invariants

    def guard(self, landing: bytearray) -> None:
        """Nothing may change in ``landing`` any more."""
        self._guarded.append((landing, bytes(landing)))

    def _received(self, transport: SimTransport, into: memoryview, data: bytes) -> None:
        address = np.frombuffer(into, np.uint8).__array_interface__["data"][0]
        for node in self.nodes:
            if node.up and node.address == transport.address:
                offset = address - node.base
                if 0 <= offset < SLOT_BYTES * NUM_SLOTS:
                    node.landing(offset, data)

    def _after_event(self) -> None:
        self.num_events += 1
        if self.num_events % 12 == 0:
            self._check_everything()

    def _check_everything(self) -> None:
        for node in self.nodes:
            node.check()
        for client in [*self.clients, self.waiter]:
            client.check()
        for mapper in self.mappers:
            if not mapper.over:
                mapper.touch()
        for landing, copy in self._guarded:
            demand(landing == copy, "bytes landed in a READ's destination after its batch had ended")


def run_seed(seed: int) -> World:
    """One run; whatever goes wrong names the seed."""
    world = World(seed)
    try:
        world.run()
    except BaseException as error:
        error.add_note(f"seed {seed}: python tests/transfer_engine/simulate.py --first {seed} --seeds 1")
        raise
    return world
