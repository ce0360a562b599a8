"""Measure what a master's work costs: real sockets, a real master, and many stub nodes and clients in this process.

    python -m benchmarks.master.scale [--nodes 100] [--keys 200000] [--clients 2000] [--active 500] [--seconds 5]

A stub node registers, renews its lease, sends signs of life and announces, as a node does, and has no memory. A stub
client has a connection; the active ones ask for the list of nodes as putting clients do. One real client at a real node
follows. The master is a process of its own, and what it costs is the CPU time that the kernel counts for it: this
process may be the slower one, and other load on the machine matters less. The rows are kept in results/scale.json;
docs/scale.md makes a plan of them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import resource
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import tanghulu
from benchmarks.common.report import keep
from benchmarks.store.store_bench import cluster, process
from tanghulu.discovery.base import Instance
from tanghulu.discovery.master import MasterDiscovery
from tanghulu.rpc.fast_aio import AsyncFastConnection
from tanghulu.store.client.logic.placement import NODES_SPREAD_S, NODES_TTL_S
from tanghulu.store.protocol import methods
from tanghulu.store.protocol.announcements import ChunkEntry, NodeAnnouncement, Removal, ReportPiece
from tanghulu.store.protocol.directory_messages import NodesRequest, PlaceRequest
from tanghulu.store.protocol.key_slots import NUM_SLOTS, slot_of
from tanghulu.store.protocol.messages import CommitKeysRequest, LocateRequest
from tanghulu.store.protocol.types import ClientCommit, CommitResult
from tanghulu.types import Address, ChunkKey, InstanceId, Place, Role

#: Keys of one message of a report, and of one that confirms commits.
PIECE_KEYS = 4096
CONFIRM_KEYS = 256
#: Keys of one put of several values.
COMMIT_KEYS = 16
CHUNK_BYTES = 200_000
HEARTBEAT_S = 1.0
LEASE_S = 300.0
#: Clients that commit at one time, and calls that each does.
NUM_COMMITTERS = 64
DEADLINE_S = 60.0


@dataclass
class ProcessMeter:
    """What the kernel says of a process."""

    pid: int

    @property
    def cpu_s(self) -> float:
        """CPU time of all threads, those that have ended among them: its clock, as clock_getcpuclockid(3) names it."""
        return time.clock_gettime(~self.pid << 3 | 2)

    @property
    def num_fds(self) -> int:
        """Open descriptors."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    @property
    def num_bytes(self) -> int:
        """Memory of its own."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


class StubNode:
    """A node without memory: what it announces it is believed to hold."""

    def __init__(self, number: int, connection: AsyncFastConnection) -> None:
        self.instance = Instance(
            InstanceId(f"node-{number}@host-{number}:7410"),
            Role.NODE,
            Address(f"10.0.{number >> 8}.{number & 255}", 7410),
            place=Place("zone", f"rack-{number // 8}", f"host-{number}"),
            generation=number + 1,
            attributes={"host_id": f"host-{number}", "memory_bytes": str(200 << 30)},
        )
        self.connection = connection

    async def announce(
        self,
        entries: Sequence[tuple[str, int]] = (),
        removed: Sequence[tuple[str, int]] = (),
        piece: ReportPiece | None = None,
    ) -> None:
        """Announce ``entries`` (key, version); without any it is a sign of life."""
        request = NodeAnnouncement(
            self.instance.id,
            self.instance.generation,
            [ChunkEntry(ChunkKey(key), version, CHUNK_BYTES) for key, version in entries],
            [Removal(ChunkKey(key), version) for key, version in removed],
            report_id=0 if piece is None else 1,
            piece=piece,
            capacity_bytes=200 << 30,
            used_bytes=100 << 30,
        )
        method = methods.ANNOUNCE
        reply = await self.connection.call(method.number, request, method.reply, deadline_s=DEADLINE_S)
        assert len(reply.message.accepted) == len(entries)

    async def report(self, keys: Sequence[str]) -> None:
        """Tell all that it holds, slot by slot."""
        starts, in_order = range(0, max(len(keys), 1), PIECE_KEYS), sorted(keys, key=slot_of)
        for number, start in enumerate(starts):
            part = in_order[start : start + PIECE_KEYS]
            next_slot = NUM_SLOTS * (number + 1) // len(starts)
            chunks = [(ChunkKey(key), 1, CHUNK_BYTES, False) for key in part]
            await self.announce(piece=ReportPiece(number, next_slot, chunks))

    async def live(self) -> None:
        """Send signs of life until cancelled."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            await self.announce()


@dataclass
class Measured:
    """One figure: the master's CPU time for ``count`` operations, and how long they took."""

    what: str
    count: int
    cpu_s: float
    took_s: float

    def row(self) -> dict[str, Any]:
        """As it is kept."""
        return {
            "what": self.what,
            "count": self.count,
            "master_cpu_us": round(self.cpu_s / self.count * 1e6, 2),
            "per_s": round(self.count / self.took_s),
            "per_core_s": round(self.count / self.cpu_s) if self.cpu_s else 0,
        }


class Bench:
    """A master, the stubs, and the rows."""

    def __init__(self, meter: ProcessMeter, address: Address, options: argparse.Namespace) -> None:
        self.meter, self.address, self.options = meter, address, options
        self.rng = random.Random(options.seed)
        self.nodes: list[StubNode] = []
        self.clients: list[AsyncFastConnection] = []
        self.rows: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}
        self._living: list[asyncio.Task[None]] = []
        self._idle_share = 0.0

    async def measure(self, what: str, count: int, step: Callable[[], Awaitable[object]]) -> None:
        """Keep what ``step`` costs the master, which is ``count`` operations, less what the living nodes cost it."""
        cpu_s, begun_s = self.meter.cpu_s, time.perf_counter()
        await step()
        took_s = time.perf_counter() - begun_s
        spent_s = max(self.meter.cpu_s - cpu_s - self._idle_share * took_s, 0.0)
        self.rows.append(Measured(what, count, spent_s, took_s).row())

    async def ask(self, connection: AsyncFastConnection, method: Any, request: Any) -> Any:
        """One call to the master."""
        return (await connection.call(method.number, request, method.reply, deadline_s=DEADLINE_S)).message

    # --- nodes

    async def add_nodes(self, discovery: MasterDiscovery) -> None:
        """Register all nodes; then see what they cost by being there.

        Leases are long, so that a machine with other load does not end them, and their renewal is measured by itself.
        """
        for number in range(self.options.nodes):
            self.nodes.append(StubNode(number, await AsyncFastConnection.connect(self.address)))
        await self.measure(
            "registration of a node",
            len(self.nodes),
            lambda: asyncio.gather(*(discovery.register(node.instance, LEASE_S) for node in self.nodes)),
        )
        renewals = [(each._instance, each._lease_id) for each in discovery.registrations]
        await self.measure(
            "renewal of a lease",
            len(renewals) * 5,
            lambda: asyncio.gather(*(discovery.keep_alive(*each) for each in renewals * 5)),
        )
        self._living = [asyncio.create_task(node.live()) for node in self.nodes]
        await asyncio.sleep(2 * HEARTBEAT_S)
        seconds = self.options.seconds
        await self.measure("sign of life", len(self.nodes) * seconds, lambda: asyncio.sleep(seconds))
        self._idle_share = self.rows[-1]["master_cpu_us"] * len(self.nodes) / 1e6

    async def report(self) -> None:
        """Have every node report its share of the keys; what a key costs in time and in memory."""
        num_keys = self.options.keys // len(self.nodes)
        shares = [[_key(self.rng) for _ in range(num_keys)] for _ in self.nodes]
        before = self.meter.num_bytes
        await self.measure(
            "key reported",
            num_keys * len(self.nodes),
            lambda: asyncio.gather(*(node.report(keys) for node, keys in zip(self.nodes, shares, strict=True))),
        )
        self.facts["memory_per_key_bytes"] = round((self.meter.num_bytes - before) / (num_keys * len(self.nodes)))
        self.some_keys = [keys[0] for keys in shares]

    # --- clients

    async def connect_clients(self) -> None:
        """Connect all clients; each says who it is by a first call."""
        fds, num_bytes, num_clients = self.meter.num_fds, self.meter.num_bytes, self.options.clients
        begun_s = time.perf_counter()
        for start in range(0, num_clients, 100):
            count = min(100, num_clients - start)
            new = await asyncio.gather(*(AsyncFastConnection.connect(self.address) for _ in range(count)))
            await asyncio.gather(*(self.ask(each, methods.NODES, _nodes_request()) for each in new))
            self.clients += new
        self.facts |= {
            "clients": num_clients,
            "connects_per_s": round(num_clients / (time.perf_counter() - begun_s)),
            "fds": self.meter.num_fds,
            "fds_per_client": round((self.meter.num_fds - fds) / num_clients, 2),
            "memory_per_client_bytes": round((self.meter.num_bytes - num_bytes) / num_clients),
        }

    async def commit(self) -> None:
        """Clients commit keys one by one, and the nodes confirm them in their announcements."""
        num_keys = max(self.options.keys // 10, NUM_COMMITTERS)
        by_node: list[list[tuple[str, int]]] = [[] for _ in self.nodes]
        numbers = iter(range(num_keys))

        async def committer(connection: AsyncFastConnection) -> None:
            for number in numbers:
                node, key = self.nodes[number % len(self.nodes)], _key(self.rng)
                said = ClientCommit(node.instance.id, node.instance.generation, ChunkKey(key), number, CHUNK_BYTES)
                reply = await self.ask(connection, methods.COMMIT_KEYS, CommitKeysRequest([said]))
                if reply.results != [CommitResult.ACCEPTED]:
                    raise SystemExit(f"the master did not accept a commit: {reply.results}")
                by_node[number % len(self.nodes)].append((key, number))

        async def committer_of_many(connection: AsyncFastConnection) -> None:
            for number in calls:
                index = number % len(self.nodes)
                node, keys = self.nodes[index], [ChunkKey(_key(self.rng)) for _ in range(COMMIT_KEYS)]
                said = [ClientCommit(node.instance.id, node.instance.generation, key, 1, CHUNK_BYTES) for key in keys]
                reply = await self.ask(connection, methods.COMMIT_KEYS, CommitKeysRequest(said))
                if reply.results.count(CommitResult.ACCEPTED) < len(keys):
                    raise SystemExit("the master did not accept all commits of a call")
                by_node[index] += [(key, 1) for key in keys]

        committers = self.clients[:NUM_COMMITTERS]
        await self.measure("commit of one key", num_keys, lambda: asyncio.gather(*map(committer, committers)))
        await self.measure("key confirmed by its node", num_keys, lambda: self._confirm(by_node))
        removed, by_node = by_node, [[] for _ in self.nodes]
        calls = iter(range(num_keys // COMMIT_KEYS))
        what = f"commit of a key, {COMMIT_KEYS} in a call"
        num_together = num_keys // COMMIT_KEYS * COMMIT_KEYS
        await self.measure(what, num_together, lambda: asyncio.gather(*map(committer_of_many, committers)))
        await self._confirm(by_node)
        await self.measure("key removed by its node", num_keys, lambda: self._remove(removed))

    async def _remove(self, by_node: Sequence[Sequence[tuple[str, int]]]) -> None:
        for node, entries in zip(self.nodes, by_node, strict=True):
            for start in range(0, len(entries), CONFIRM_KEYS):
                await node.announce(removed=entries[start : start + CONFIRM_KEYS])

    async def _confirm(self, by_node: Sequence[Sequence[tuple[str, int]]]) -> None:
        async def confirm(node: StubNode, entries: Sequence[tuple[str, int]]) -> None:
            for start in range(0, len(entries), CONFIRM_KEYS):
                await node.announce(entries[start : start + CONFIRM_KEYS])

        await asyncio.gather(*(confirm(*each) for each in zip(self.nodes, by_node, strict=True)))

    async def look_up(self) -> None:
        """The calls of gets, of prefixes and of placement."""
        many = (self.some_keys * (1000 // len(self.some_keys) + 1))[:1000]
        place = PlaceRequest(CHUNK_BYTES, client_place="zone/elsewhere/host")
        for what, method, count, request in (
            ("location of one key", methods.LOCATE, 5000, LocateRequest(self.some_keys[:1], False)),
            ("location of 16 keys in a call", methods.LOCATE, 2000, LocateRequest(many[:16], False)),
            ("existence of 1,000 keys", methods.LOCATE, 500, LocateRequest(many, True)),
            ("placement", methods.PLACE, 5000, place),
            ("list of nodes, unchanged", methods.NODES, 5000, await self._known_list()),
            ("list of nodes, another version", methods.NODES, 500, _nodes_request()),
            ("list of nodes, figures of now", methods.NODES, 100, NodesRequest()),
        ):
            await self.measure(what, count, lambda *, m=method, c=count, r=request: self._repeat(m, r, c))

    async def _repeat(self, method: Any, request: Any, count: int) -> None:
        numbers = iter(range(count))

        async def one(connection: AsyncFastConnection) -> None:
            for _ in numbers:
                await self.ask(connection, method, request)

        await asyncio.gather(*map(one, self.clients[:NUM_COMMITTERS]))

    async def _known_list(self) -> NodesRequest:
        reply = await self.ask(self.clients[0], methods.NODES, _nodes_request())
        return NodesRequest(reply.version, reply.master_generation, versioned=True)

    async def ask_as_clients_that_put(self) -> None:
        """The active clients ask for the list of nodes as often as putting clients do; its share of a core."""
        request, seconds, num_asked = await self._known_list(), self.options.seconds, 0

        async def ask(connection: AsyncFastConnection) -> None:
            nonlocal num_asked
            await asyncio.sleep(self.rng.random() * NODES_TTL_S)
            while True:
                reply = await self.ask(connection, methods.NODES, request)
                assert reply.unchanged, "the nodes changed while they were measured"
                num_asked += 1
                await asyncio.sleep(NODES_TTL_S + self.rng.random() * NODES_SPREAD_S)

        asking = [asyncio.create_task(ask(each)) for each in self.clients[: self.options.active]]
        await asyncio.sleep(2 * NODES_TTL_S)
        num_asked, cpu_s, begun_s = 0, self.meter.cpu_s, time.perf_counter()
        await asyncio.sleep(seconds)
        took_s = time.perf_counter() - begun_s
        spent_s = max(self.meter.cpu_s - cpu_s - self._idle_share * took_s, 0.0)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        self.rows.append(Measured("question of an active client", num_asked, spent_s, took_s).row())
        self.facts |= {"active": len(asking), "nodes_share_of_a_core": round(spent_s / took_s, 4)}

    async def close(self) -> None:
        """End all stubs."""
        for task in self._living:
            task.cancel()
        await asyncio.gather(*self._living, return_exceptions=True)
        for start in range(0, len(self.clients), 500):
            await asyncio.gather(*(each.close() for each in self.clients[start : start + 500]))
        await asyncio.gather(*(node.connection.close() for node in self.nodes))


def real_operations(count: int, seed: int) -> list[dict[str, Any]]:
    """CPU time of an operation in all three processes: a real master, a real node, and a client that is this one."""
    rng, rows = random.Random(seed), []
    with cluster() as (master, node):
        meters = {"master_cpu_us": ProcessMeter(master.pid), "node_cpu_us": ProcessMeter(node.pid)}
        for way in (None, "tcp"):
            with tanghulu.connect(master.address, transport=way) as client:
                for size, part in ((4 << 10, 1), (1 << 20, 10)):
                    keys, value = [_key(rng) for _ in range(count // part)], rng.randbytes(size)
                    steps: dict[str, Callable[[str], object]] = {
                        "put": lambda key, client=client, value=value: client.put(key, value),
                        "get": lambda key, client=client: client.get(key).close(),
                        "exists": client.exists,
                    }
                    for name, step in steps.items():
                        before = {each: meter.cpu_s for each, meter in meters.items()}
                        own_s = time.process_time()
                        for key in keys:
                            step(key)
                        spent = {"client_cpu_us": time.process_time() - own_s}
                        spent |= {each: meter.cpu_s - before[each] for each, meter in meters.items()}
                        what = f"{name}, {size >> 10} KiB, {way or 'shm'}"
                        costs = {each: round(cpu_s / len(keys) * 1e6, 1) for each, cpu_s in spent.items()}
                        rows.append({"what": what, "count": len(keys), **costs})
    return rows


def _key(rng: random.Random) -> str:
    return f"kv/{rng.getrandbits(128):032x}"


def _nodes_request() -> NodesRequest:
    return NodesRequest(versioned=True)


async def run(bench: Bench) -> None:
    """All measurements, one after the other."""
    async with AsyncExitStack() as stack:
        discovery = await stack.enter_async_context(MasterDiscovery(bench.address))
        stack.push_async_callback(bench.close)
        await bench.add_nodes(discovery)
        await bench.report()
        await bench.connect_clients()
        await bench.commit()
        await bench.look_up()
        await bench.ask_as_clients_that_put()


def shown(bench: Bench, real: Sequence[dict[str, Any]]) -> Iterator[Table | str]:
    """The figures for people."""
    table = Table("operation of one client", "count", "master CPU us", "node CPU us", "client CPU us")
    for row in real:
        cells = (f"{row[name]:,}" for name in ("count", "master_cpu_us", "node_cpu_us", "client_cpu_us"))
        table.add_row(row["what"], *cells)
    yield table
    table = Table("operation", "count", "master CPU us", "here/s", "most/s of a core")
    for row in bench.rows:
        cells = (f"{row[name]:,}" for name in ("count", "master_cpu_us", "per_s", "per_core_s"))
        table.add_row(row["what"], *cells)
    yield table
    yield ", ".join(f"{name} {value:,}" for name, value in bench.facts.items())


def main() -> None:
    """Measure, show, keep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--keys", type=int, default=200_000, help="that all nodes report together")
    parser.add_argument("--clients", type=int, default=2000, help="that are connected")
    parser.add_argument("--active", type=int, default=500, help="of them, that put")
    parser.add_argument("--seconds", type=int, default=5)
    parser.add_argument("--operations", type=int, default=2000, help="of one real client, of each kind")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # here, and in the master
    connections = str(options.clients + options.nodes + 100)
    with process("tanghulu.store.master.main", "--port", "0", "--max-connections", connections) as master:
        bench = Bench(ProcessMeter(master.pid), Address.parse(master.address), options)
        asyncio.run(run(bench))
    real = real_operations(options.operations, options.seed)
    for part in shown(bench, real):
        Console().print(part)
    facts = {"nodes": options.nodes, "keys": options.keys, **bench.facts}
    print("kept in", keep("scale", bench.rows + real, seed=options.seed, load_average=os.getloadavg()[0], facts=facts))


if __name__ == "__main__":
    main()
