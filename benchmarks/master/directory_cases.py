"""What the directories that are compared have in common: cases that are measured in turns, and a master to ask."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.master.scale import CHUNK_BYTES, ProcessMeter
from benchmarks.peers.redis_directory import eventually
from benchmarks.store.store_bench import Started
from tanghulu.discovery.base import Instance
from tanghulu.discovery.instance_wire import InstanceEntry
from tanghulu.discovery.membership import REGISTER, RegisterRequest
from tanghulu.errors import TanghuluError
from tanghulu.rpc.fast_client import Call, FastConnection
from tanghulu.store.protocol import methods
from tanghulu.store.protocol.announcements import ChunkEntry, NodeAnnouncement, ReportPiece
from tanghulu.store.protocol.directory_messages import NodesRequest
from tanghulu.store.protocol.key_slots import NUM_RANGES, NUM_SLOTS, slot_of
from tanghulu.store.protocol.types import ClientCommit
from tanghulu.types import Address, ChunkKey, InstanceId, Place, Role

#: Blocks whose keys would be grouped.
GROUP_KEYS = 16
NUM_NODES = 3
PIECE_KEYS = 4096
LEASE_MS = 300_000
DEADLINE_S = 60.0


@dataclass
class Case:
    """One thing that is done ``calls`` times in a round; each call is ``num_operations`` operations."""

    system: str
    what: str
    pids: Sequence[int]
    step: Callable[[], object]
    calls: int = 300
    num_operations: int = 1
    after: Callable[[], object] = lambda: None
    found: list[tuple[float, float, float]] = field(default_factory=list)

    def round(self) -> None:
        """Do it, and keep (CPU of the servers, CPU of this process, median time), in microseconds."""
        meters, times = [ProcessMeter(pid) for pid in self.pids], []
        servers_s, own_s = sum(each.cpu_s for each in meters), time.process_time()
        for _ in range(self.calls):
            begun_s = time.perf_counter()
            self.step()
            times.append(time.perf_counter() - begun_s)
        own_s = time.process_time() - own_s
        servers_s = sum(each.cpu_s for each in meters) - servers_s
        self.found.append((servers_s / self.calls * 1e6, own_s / self.calls * 1e6, statistics.median(times) * 1e6))
        self.after()

    def row(self) -> dict[str, Any]:
        """The medians: CPU an operation, and the time and the client's CPU of a call."""
        servers_us, client_us, p50_us = (statistics.median(column) for column in zip(*self.found, strict=True))
        return {
            "system": self.system,
            "what": self.what,
            "operations_a_call": self.num_operations,
            "server_cpu_us": round(servers_us / self.num_operations, 2),
            "server_cpu_us_a_call": round(servers_us, 1),
            "client_cpu_us_a_call": round(client_us, 1),
            "p50_us": round(p50_us, 1),
        }


def in_turns(cases: Sequence[Case], rounds: int, rng: random.Random) -> list[dict[str, Any]]:
    """All cases in every round, each round in another order; a first one that does not count warms up."""
    for _ in range(rounds + 1):
        for case in rng.sample(list(cases), len(cases)):
            case.round()
    for case in cases:
        del case.found[0]
    return [case.row() for case in cases]


def key_of(rng: random.Random) -> str:
    """A key as workers make them."""
    return f"kv/{rng.getrandbits(128):032x}"


def group_of_keys(rng: random.Random) -> list[str]:
    """The keys of a run of blocks that name in braces what their slot is computed from, so that they stay together."""
    group = f"{rng.getrandbits(32):08x}"
    return [f"kv/{{{group}}}{rng.getrandbits(128):032x}" for _ in range(GROUP_KEYS)]


def range_of(key: str) -> int:
    """The range of slots that ``key`` belongs to: by what stands in braces, or by all of it."""
    begin = key.find("{")
    if begin >= 0:
        key = key[begin + 1 : key.index("}", begin)]
    return slot_of(key) * NUM_RANGES // NUM_SLOTS


class MasterDirectory:
    """A master with stub nodes, which hold what they say."""

    def __init__(self, started: Started) -> None:
        self.pid = started.pid
        address = Address.parse(started.address)
        self.connection = FastConnection(address)
        self._links = [FastConnection(address) for _ in range(NUM_NODES)]
        self.nodes = [_instance(number) for number in range(NUM_NODES)]
        for node in self.nodes:
            self.ask(REGISTER.call(RegisterRequest(InstanceEntry.of(node), LEASE_MS)))
        self._committed: list[list[tuple[str, int]]] = [[] for _ in self.nodes]
        self._turn = 0

    def ask(self, call: Call[Any]) -> Any:
        """One call; raises its typed error."""
        reply = self.connection.call_one(call, deadline_s=DEADLINE_S)
        if isinstance(reply, TanghuluError):
            raise reply
        return reply.message

    def _announce(self, index: int, **more: Any) -> None:
        node = self.nodes[index]
        request = NodeAnnouncement(node.id, node.generation, capacity_bytes=200 << 30, used_bytes=100 << 30, **more)
        reply = self._links[index].call_one(methods.ANNOUNCE.call(request), deadline_s=DEADLINE_S)
        if isinstance(reply, TanghuluError):
            raise reply

    def report(self, keys: Sequence[str]) -> dict[str, Any]:
        """Report ``keys``, a share a node; what that costs a key. Then the directory is complete."""
        meter = ProcessMeter(self.pid)
        before, cpu_s = meter.num_bytes, meter.cpu_s
        for index in range(NUM_NODES):
            share = sorted(keys[index::NUM_NODES], key=slot_of)
            starts = range(0, max(len(share), 1), PIECE_KEYS)
            for number, start in enumerate(starts):
                part = share[start : start + PIECE_KEYS]
                slot = NUM_SLOTS if start == starts[-1] else 0
                piece = ReportPiece(number, slot, [(ChunkKey(key), 1, CHUNK_BYTES, False) for key in part])
                self._announce(index, report_id=1, piece=piece)
        time.sleep(0.2)  # a tick sorts what is left
        eventually(lambda: not self.ask(methods.NODES.call(NodesRequest())).rebuilding)
        return report_row("master", (meter.cpu_s - cpu_s) / len(keys), (meter.num_bytes - before) / len(keys))

    def commits(self, keys: Sequence[str]) -> list[ClientCommit]:
        """What a client says of new keys, all at one node."""
        self._turn = (self._turn + 1) % NUM_NODES
        node = self.nodes[self._turn]
        self._committed[self._turn] += [(key, 7) for key in keys]
        return [ClientCommit(node.id, node.generation, ChunkKey(key), 7, CHUNK_BYTES) for key in keys]

    def confirm(self) -> None:
        """The nodes announce what was committed."""
        for index, entries in enumerate(self._committed):
            for start in range(0, len(entries), PIECE_KEYS):
                part = entries[start : start + PIECE_KEYS]
                added = [ChunkEntry(ChunkKey(k), v, CHUNK_BYTES) for k, v in part]
                self._announce(index, added=added)
            entries.clear()

    def close(self) -> None:
        """Close all connections."""
        for each in (self.connection, *self._links):
            each.close()


def _instance(number: int) -> Instance:
    return Instance(
        InstanceId(f"node-{number}@host-{number}:7410"),
        Role.NODE,
        Address(f"10.0.0.{number + 1}", 7410),
        place=Place("zone", f"rack-{number}", f"host-{number}"),
        generation=number + 1,
        attributes={"host_id": f"host-{number}", "memory_bytes": str(200 << 30)},
    )


def report_row(system: str, cpu_s: float, bytes_a_key: float) -> dict[str, Any]:
    """What a report costs, of a key."""
    return {
        "system": system,
        "what": "key reported",
        "server_cpu_us": round(cpu_s * 1e6, 2),
        "keys_a_core_s": round(1 / cpu_s),
        "bytes_a_key": round(bytes_a_key),
    }
