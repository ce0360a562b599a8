"""A little cluster in virtual time on the production classes, and what must hold in it after every event.

Nodes own segments through AccessTable and PeerAdmission; clients put and get through TransferEngine, RemoteSegment,
TransferHandle and the tcp transport, on a SimNetwork. One client waits for its batches (``TransferHandle.wait`` and
``TransferEngine.transfer`` as they are); the others are stepped, several batches at once; one maps memory and touches
it whenever it likes. Everything is drawn from one seed.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import Counter
from collections.abc import Callable

import numpy as np

from tanghulu.errors import ChecksumMismatch, NodeUnavailable, TanghuluError
from tanghulu.transfer_engine.core.slices import Opcode
from tanghulu.transfer_engine.engine import RemoteSegment, TransferBatch, TransferHandle, TransferRequest
from tests.transfer_engine.sim.actors import (
    CONFIG,
    EXPECTED,
    NUM_SLOTS,
    SLOT_BYTES,
    SimClient,
    SimNode,
    demand,
)
from tests.transfer_engine.sim.mapper import Mapper
from tests.transfer_engine.sim.network import SimNetwork, Weather
from tests.transfer_engine.sim.transport import SimTransport
from tests.virtual.clock import ManualClock


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
            taint=self.chance.choice([0.0, 0.1]),
            delay_max_s=self.chance.choice([0.002, 0.02, 0.2]),
            resend_s=self.chance.choice([0.05, 0.3]),
            window_bytes=self.chance.choice([100, 300, 3000]),
        )
        self.network = SimNetwork(self.clock, self.chance, weather)
        self.network.on_received = self._received
        self.network.after_event = self._after_event
        self.network.may_taint = self._may_taint
        self._taints = weather.taint > 0
        self._taintable: list[tuple[int, int]] = []
        self._expected_notices: dict[bytes, Callable[[str], None]] = {}
        self.num_notices: Counter[bytes] = Counter()
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
        """The waiting client does one operation, through the ports that callers use."""
        up = [node for node in self.nodes if node.up]
        if not up:
            return
        node = self.chance.choice(up)
        self._maybe_greet(node)
        made = (self.waiter.put if self.chance.random() < 0.6 else self.waiter.get)(node) if node.up else None
        if made is not None:
            self._transfer(*made, self.chance.choice([0.05, 1.5, 4.0]))

    def _maybe_greet(self, node: SimNode) -> None:
        remote, _ = self.waiter.open(node)
        if self.chance.random() < 0.3:
            with contextlib.suppress(NodeUnavailable):
                remote.greet(0.5, self.clock)

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
        except EXPECTED as error:
            self._check_taint(error)
            ok = False
        demand(self.clock.now_s() <= latest_s, f"a transfer outlived its deadline of {deadline_s} s")
        self._count(ok)
        ended(ok)
        return ok

    def finish(self, handle: TransferHandle, ended: Callable[[bool], None]) -> bool:
        result = handle.wait(0)
        demand(handle.done, "a batch whose deadline has come goes on")
        for index, error in enumerate(result.errors):
            self._check_taint(error)
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
        demand(most <= 3 + CONFIG.retries_max, f"a slice was tried {most} times:\n" + "\n".join(story))
        wrong = max((text.count(" corrupt ") for text in story), default=0)
        demand(wrong or most <= 1 + CONFIG.retries_max, f"a slice was tried {most} times:\n" + "\n".join(story))

    def _count(self, ok: bool) -> None:
        self.num_complete += ok
        self.num_failed += not ok

    def parts(
        self,
        opcode: Opcode,
        memory: bytes | bytearray,
        remote: RemoteSegment,
        offset: int,
        lease: int,
        *,
        verify: bool,
    ) -> list[TransferRequest]:
        """One transfer as one to three requests, of which some notify the owner."""
        size = len(memory)
        cuts = sorted({0, size, *(self.chance.randint(0, size) for _ in range(self.chance.randint(0, 2)))})
        return [
            TransferRequest(
                opcode,
                memory,
                remote,
                offset + start,
                end - start,
                source_offset=start,
                lease_id=lease,
                verify=verify,
                notify=b"%d" % self.next_number() if self.chance.random() < 0.25 else None,
            )
            for start, end in itertools.pairwise(cuts)
        ]

    # --- checksums and notices

    def expect_taint(self, landing: bytearray) -> None:
        """What is read into ``landing`` is compared, so it may be changed on its way."""
        self._taintable.append((np.frombuffer(landing, np.uint8).__array_interface__["data"][0], len(landing)))

    def _may_taint(self, into: memoryview) -> bool:
        address = np.frombuffer(into, np.uint8).__array_interface__["data"][0]
        if any(start <= address < start + size for start, size in self._taintable):
            return True
        for node in self.nodes:
            offset = address - node.base
            if node.up and 0 <= offset < SLOT_BYTES * NUM_SLOTS:
                attempts = node.slots[offset // SLOT_BYTES].attempts
                return bool(attempts) and attempts[-1].verified
        return False

    def _check_taint(self, error: TanghuluError | None) -> None:
        demand(not isinstance(error, ChecksumMismatch) or self._taints, f"{error!r} without reason")

    def expect_notices(
        self, requests: list[TransferRequest], on_notice: Callable[[str, TransferRequest], None]
    ) -> Callable[[], bool]:
        """``on_notice`` judges each when it comes; the answer says whether all have come."""
        notices = [each for each in requests if each.notify is not None]
        for each in notices:
            assert each.notify is not None
            self._expected_notices[each.notify] = lambda where, each=each: on_notice(where, each)  # type: ignore[misc]
        return lambda: all(self.num_notices[each.notify or b""] == 1 for each in notices)

    def noticed(self, node: SimNode, data: bytes) -> None:
        self.num_notices[data] += 1
        where = f"{node.name}'s notice {data.decode()}"
        demand(data in self._expected_notices, f"{where}: nobody sent it")
        demand(self.num_notices[data] == 1, f"{where}: delivered a second time")
        self._expected_notices[data](where)

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
        acts = [
            self._partition,
            self._partition,
            self._stall,
            self._stall,
            self._stall,
            self._crash_client,
            self._crash_node,
        ]
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
            self.network.later(self.chance.uniform(0.05, 1.0), lambda: self.network.wake(node.address))

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
        self.network.weather.taint = 0.0
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
    except Exception as error:
        error.add_note(f"seed {seed}: python -m tests.transfer_engine.sim --first {seed} --seeds 1")
        raise
    return world
