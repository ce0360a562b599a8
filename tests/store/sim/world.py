"""A whole store in virtual time: a master, nodes, clients, faults, and what must hold after every step.

One seed is one life: sizes, traffic, crashes, cut and slow links, torn connections. The invariants:

* a put that has returned is found while one of its holders lives and has been in touch with the master;
* a value that is read is one that was put under its key, whole; nothing but typed errors comes out, in time;
* in a calm life, where nothing fails and everything fits, that holds without exception, and a key keeps its value;
  where nothing fails, whoever removes what was put has removed it;
* what was removed, and not put since, is nowhere, though chunks move from node to node meanwhile: at once where nothing
  fails, else at the end;
* no key is called missing while a node that is let in holds it (`DeniedChunks` has the rule);
* in every node free + used == capacity and no two chunks overlap (`NodeState.check`), master and sessions are sound;
* when all links are whole again, directory and nodes agree within ``CONVERGE_S``, and what was removed stays so;
  of clients that have ended no node keeps anything: no lease, no reservation, no write buffer.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from tanghulu.discovery.base import Instance
from tanghulu.errors import ChunkNotFound, TanghuluError
from tanghulu.store.client.aio import AsyncClient
from tanghulu.store.master.directory.listing import snapshot
from tanghulu.store.master.directory.ranges import RangeDirectories
from tanghulu.store.node.ssd.tier import SsdPlace
from tanghulu.store.node.state.chunk import ChunkState
from tests.store.sim.actors import MASTER, SimMaster, SimNode, SimProcess, kill_writers, open_client
from tests.store.sim.denied_chunks import DeniedChunks
from tests.store.sim.plan import KeyLife, Plan
from tests.virtual.loop import PID, VirtualLoop, on_host
from tests.virtual.surroundings import collected_garbage, virtual_time

DEADLINE_S = 5.0
#: How long after a disturbance of a node's or the master's the directory may still be behind.
CONVERGE_S = 8.0
_SLACK_S = 0.5
#: Nodes whose invariants are asserted beside the master's, every so often; all of them at the end.
_CHECKED_NODES = 2
_CHECK_EVERY_S = 0.15
#: Nodes that may join.
_MOST_JOIN = 3
#: Steps of the world between two collections of garbage.
_GARBAGE_EVERY = 20
#: Where files cost no disk.
_MEMORY = "/dev/shm"


class World:
    """See the module. ``run`` lives one seed's life; it raises AssertionError that names what did not hold."""

    begins_s = 1.0  # until then nobody puts anything, and nothing fails

    def __init__(self, seed: int, plan: Plan | None = None) -> None:
        self.seed = seed
        self.rng = Random(seed)
        self.plan = plan or Plan.of(self.rng)
        self.loop = VirtualLoop(Random(self.rng.random()))
        self.network = self.loop.network
        self.master: SimMaster
        self.nodes: dict[str, SimNode] = {}
        self.keys: dict[str, KeyLife] = {}
        self.counts: Counter[str] = Counter()
        self.restarted_master_s = 0.0
        self._disturbed_s: dict[str, float] = {}
        self._pids = itertools.count(1000)
        self._clients: dict[int, tuple[asyncio.Task[None], AsyncClient]] = {}
        self._generation = 0
        self._dead: list[SimProcess] = []  # what they waited for is nobody's business, but not lost
        self._failure: BaseException | None = None
        self._ended = False
        self._num_checks = 0
        self._disks: Path | None = None

    def run(self) -> Counter[str]:
        """One life; returns how often what happened."""
        self.network.cuts_frames = self.plan.cuts_frames
        with virtual_time(self), self._disks_made(), collected_garbage(), DeniedChunks(self).watched():
            self.loop.set_exception_handler(self._unhandled)
            try:
                self.loop.run_until_complete(self._live())
            finally:
                self.loop.all_go_on()
                for task in asyncio.all_tasks(self.loop):
                    task.cancel()
                self.loop.run_until_complete(asyncio.sleep(1))
                self.loop.close()
                for node in self.nodes.values():
                    node.close_disk()
        self._raise()
        return self.counts

    @contextlib.contextmanager
    def _disks_made(self) -> Iterator[None]:
        if not self.plan.disk_bytes:
            yield
            return
        with tempfile.TemporaryDirectory(dir=_MEMORY if os.path.isdir(_MEMORY) else None) as path:
            self._disks = Path(path)
            yield

    def disk_of(self, host: str) -> SsdPlace | None:
        """The file of that host's SSD tier, which outlives the node; None if nodes have none."""
        return None if self._disks is None else SsdPlace(self._disks / host, self.plan.disk_bytes, 0)

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception") or AssertionError(f"{context['message']} {context.get('task', '')!r}")
        if not self._ended:
            self.fail(error)

    def clock_s(self) -> float:
        """The time; all hosts have the same."""
        return self.loop.time()

    def fail(self, error: BaseException) -> None:
        """Remember the first thing that went wrong."""
        if self._failure is None:
            self._failure = error

    def _raise(self) -> None:
        if self._failure is not None:
            raise AssertionError(f"seed {self.seed}, {self.plan}: {self._failure!r}") from self._failure

    # --- life

    async def _live(self) -> None:
        self._start_masters()
        for number in range(self.plan.num_nodes):
            self._start_node(number)
        await asyncio.sleep(self.begins_s)
        clients = [on_host(f"client-{n}", self._client(n)) for n in range(self.plan.num_clients)]
        ends_s = self.loop.time() + self.plan.seconds
        next_fault_s = self.loop.time() + self.plan.fault_every_s
        next_check_s = 0.0
        while self.loop.time() < ends_s:
            await asyncio.sleep(0.05)
            self._raise()
            if int(self.loop.time() / 0.05) % _GARBAGE_EVERY == 0:
                gc.collect(1)
            if self.loop.time() >= next_check_s:
                next_check_s = self.loop.time() + _CHECK_EVERY_S
                self.check(_CHECKED_NODES)
            if (self.plan.faults or self.plan.master_faults) and self.loop.time() >= next_fault_s:
                next_fault_s = self.loop.time() + self.rng.expovariate(1 / self.plan.fault_every_s)
                self._fault()
        self._ended = True
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        self._ended = False
        await self._settle()
        gc.collect()  # a task that nobody refers to is destroyed, and was lost
        self._raise()
        self._ended = True

    # --- masters

    @property
    def masters_named(self) -> str:
        """The masters as clients and nodes are told of them."""
        return str(MASTER)

    @property
    def master_hosts(self) -> tuple[str, ...]:
        """The hosts of the masters."""
        return (MASTER.host,)

    @property
    def masters(self) -> list[SimMaster]:
        """The masters that are alive, and the last one if none is."""
        return [self.master]

    def answers_for(self, directory: RangeDirectories, number: int) -> bool:
        """Whether clients believe what is said there of that range."""
        return True

    async def registered(self, instance: Instance, lease_id: int) -> int:
        """Enter the node, or renew its lease: what MasterDiscovery does by gRPC. Returns the lease's id."""
        host, current = instance.address.host, self.master
        await asyncio.sleep(self.network.latency_s(host, MASTER.host))
        if current.alive and not self.network.is_cut(host, MASTER.host):
            lease_id = current.registered(instance, lease_id)
        return lease_id

    def _start_masters(self) -> None:
        self._start_master()

    def _start_master(self) -> None:
        self._generation += 1
        self.restarted_master_s = self.loop.time()
        self.master = SimMaster(self.network, self._generation, Random(self.rng.random()))

    def _start_node(self, number: int) -> None:
        self._generation += 1
        node = SimNode(number, self.network, self, self._generation, self.plan.node_bytes)
        self.nodes[node.host] = node
        self._disturb(node.host)

    def _disturb(self, host: str) -> None:
        self._disturbed_s[host] = self.loop.time()

    def check(self, num_nodes: int = 1 << 20) -> None:
        """Assert the invariants of so many nodes, and of a master; of each when all nodes are looked at."""
        masters = self.masters
        self._num_checks += 1
        for number, master in enumerate(masters):
            if num_nodes > _CHECKED_NODES or number == self._num_checks % len(masters):
                master.check()
        alive = [node for node in self.nodes.values() if node.alive]
        for node in self.rng.sample(alive, min(num_nodes, len(alive))):
            node.check()
        if self.plan.orderly:
            self._check_removed()

    def _check_removed(self) -> None:
        """Assert that no node has a key that was removed and not put since."""
        for node in [node for node in self.nodes.values() if node.alive]:
            for key in node.keys:
                life = self.keys[key]
                assert life.gone_s is None, f"{key} was removed at {life.gone_s:.3f}, and {node.host} has it"

    # --- faults

    def _fault(self) -> None:
        kind = self.rng.choice(self.plan.faults)
        self.counts[kind] += 1
        host = self.rng.choice(sorted(self.nodes))
        match kind:
            case "crash":
                self._crash(host)
            case "cut":
                other = self.rng.choice([*self.master_hosts, *(f"client-{n}" for n in range(self.plan.num_clients))])
                self._cut(host, other, self.rng.uniform(0.2, 8))
            case "isolate":  # for so long that the masters take it for dead
                seconds = self.rng.uniform(4, 7)
                for other in self.master_hosts:
                    self._cut(host, other, seconds)
            case "slow":
                self._slow(host)
            case "tear":
                for pipe in [p for p in self.network.pipes if host in (p.host, p.peer.host)]:
                    if self.rng.random() < 0.5:
                        self.network.tear(pipe, ConnectionResetError("torn"))
            case "master":
                self._crash_master()
            case "kill" if self._clients:
                self._kill_client(self.rng.choice(list(self._clients)))
            case "mend":
                self._mend()
            case "join" if len(self.nodes) < self.plan.num_nodes + _MOST_JOIN:
                self._start_node(len(self.nodes))
            case "drain" if self.nodes[host].alive:
                node = self.nodes[host]
                node.drain(True)
                self.loop.call_later(self.rng.uniform(1, 5), node.drain, False)

    def _crash(self, host: str) -> None:
        node = self.nodes[host]
        if node.alive:
            node.kill(silently=self.rng.random() < 0.3)
            self._dead.append(node)
            self._disturb(host)
            self.loop.call_later(self.rng.uniform(0.1, 6), self._restart_node, int(host.partition("-")[2]))

    def _restart_node(self, number: int) -> None:
        if not self.nodes[f"node-{number}"].alive:
            self._start_node(number)

    def _crash_master(self) -> None:
        if self.master.alive:
            silently = self.rng.random() < 0.3
            self.master.kill(silently=silently)
            self._dead.append(self.master)
            if silently:  # nodes may notice so late that a new master has waited long enough for them
                self._disturb("master")
            self.loop.call_later(self.rng.uniform(0.1, 4), self._restart_master)

    def _restart_master(self) -> None:
        if not self.master.alive:
            self._start_master()

    def _restart_masters(self) -> None:
        self._restart_master()

    def _cut(self, one: str, other: str, seconds: float) -> None:
        self.network.cut(one, other)
        self._disturb_link(one, other)
        self.loop.call_later(seconds, self._mend_link, one, other)

    def _mend_link(self, one: str, other: str) -> None:
        if self.network.is_cut(one, other):
            self.network.mend(one, other)
            self._disturb_link(one, other)

    def _disturb_link(self, one: str, other: str) -> None:
        if other in self.master_hosts:
            self._disturb(one)

    def _slow(self, host: str) -> None:
        self.network.slow(host, self.rng.choice((20.0, 400.0)))
        self._disturb(host)
        self.loop.call_later(self.rng.uniform(0.5, 6), self._fast, host)

    def _fast(self, host: str) -> None:
        self.network.slow(host, 1.0)
        self._disturb(host)

    def _mend(self) -> None:
        self.network.mend_all()
        for host in (*self.master_hosts, *self.nodes):
            self._disturb(host)

    # --- clients

    async def _client(self, number: int) -> None:
        """One process after the other; some of them are killed."""
        rng = Random(f"{self.seed} client {number}")
        near = f"node-{rng.randrange(self.plan.num_nodes)}" if rng.random() < self.plan.near else ""
        while True:
            pid = next(self._pids)
            PID.set(pid)
            client = open_client(self, f"client-{number}", near, f"id-{pid}")
            task = asyncio.create_task(self._process(client, rng))
            self._clients[pid] = task, client
            try:
                await asyncio.wait([task])
            finally:
                task.cancel()
                client._driver._closed = True  # a process that was killed warns nobody
                self.network.process_gone(pid)
                del self._clients[pid]
                for node in self.nodes.values():
                    node.client_exited(pid)
            if not task.cancelled() and task.exception() is not None:
                self.fail(task.exception() or AssertionError)

    async def _process(self, client: AsyncClient, rng: Random) -> None:
        for _ in range(rng.randint(5, 200)):
            await asyncio.sleep(rng.expovariate(20))
            if self.plan.idle and rng.random() < self.plan.idle:
                await asyncio.sleep(rng.uniform(1, 6))
            await self._operation(client, rng)
        await client.close()

    def _kill_client(self, pid: int) -> None:
        task, client = self._clients[pid]
        kill_writers(client)
        self.network.process_gone(pid)
        task.cancel()

    async def _operation(self, client: AsyncClient, rng: Random) -> None:
        many = self.plan.removals / 20 if self.plan.moves else 0
        weights = (4, 6, 1, 1, self.plan.removals, self.plan.waits, many, many)
        kinds = ("put", "get", "get_many", "exists", "remove", "wait", "remove_many", "remove_matching")
        kind = rng.choices(kinds, weights)[0]
        key = f"key-{rng.randrange(self.plan.num_keys)}"
        began_s = self.loop.time()
        try:
            await getattr(self, f"_{kind}")(client, rng, key)
            self.counts[kind] += 1
        except TanghuluError as error:
            self.counts[f"{kind} {error.code}"] += 1
            if isinstance(error, ChunkNotFound):
                self._require_absent(key, began_s)
        except AssertionError as error:
            self.fail(error)
        took_s = self.loop.time() - began_s
        if took_s > DEADLINE_S + _SLACK_S:
            self.fail(AssertionError(f"{kind} {key} took {took_s:.2f} s"))

    async def _put(self, client: AsyncClient, rng: Random, key: str) -> None:
        others = {f"key-{rng.randrange(self.plan.num_keys)}" for _ in range(self.plan.batch)} - {key}
        begun = {each: self._begin_put(rng, each) for each in (key, *sorted(others))}
        if self.plan.batch:
            statuses = await client.put_many([(k, each[0]) for k, each in begun.items()], deadline_s=DEADLINE_S)
        else:
            replicas = rng.choice((1, 1, 2, 3))
            pin = rng.choice(("soft", "hard")) if self.plan.pins and rng.random() < self.plan.pins else "none"
            statuses = [await client.put(key, begun[key][0], replicas=replicas, pin=pin, deadline_s=DEADLINE_S)]
        for status in [each for each in statuses if each.ok]:
            begun[status.key][1]()

    def _begin_put(self, rng: Random, key: str) -> tuple[bytes, Callable[[], None]]:
        value = self.plan.value(rng, key)
        return value, self.keys.setdefault(key, KeyLife()).put(value, self.loop.time)

    async def _get(self, client: AsyncClient, rng: Random, key: str) -> None:
        with await client.get(key, deadline_s=DEADLINE_S) as chunk:
            self._require_put(key, chunk.bytes())

    async def _get_many(self, client: AsyncClient, rng: Random, key: str) -> None:
        keys = sorted({f"key-{rng.randrange(self.plan.num_keys)}" for _ in range(5)})
        began_s = self.loop.time()
        for each, found in zip(keys, await client.get_many(keys, deadline_s=DEADLINE_S), strict=True):
            if isinstance(found, ChunkNotFound):
                self._require_absent(each, began_s)
            elif not isinstance(found, TanghuluError):
                with found as chunk:
                    self._require_put(each, chunk.bytes())

    async def _exists(self, client: AsyncClient, rng: Random, key: str) -> None:
        began_s = self.loop.time()
        if not await client.exists(key, deadline_s=DEADLINE_S):
            self._require_absent(key, began_s)

    async def _wait(self, client: AsyncClient, rng: Random, key: str) -> None:
        if await client.wait_for(key, deadline_s=1.0):
            self.counts["told"] += 1
            try:
                with await client.get(key, deadline_s=DEADLINE_S / 2) as chunk:
                    self._require_put(key, chunk.bytes())
            except ChunkNotFound:  # where something fails, so may the put that was promised
                assert not self.plan.calm, f"{key} was told to be there and not found"

    async def _remove(self, client: AsyncClient, rng: Random, key: str) -> None:
        if not self.plan.doubled or rng.random() >= self.plan.doubled:
            await self._remove_once(client, key)
            return
        self.counts["doubled"] += 1
        outcomes = await asyncio.gather(*[self._remove_once(client, key) for _ in range(2)], return_exceptions=True)
        for error in [each for each in outcomes if isinstance(each, BaseException)]:
            raise error

    async def _remove_once(self, client: AsyncClient, key: str) -> None:
        with self._removing(key) as ended:
            ended(await client.remove(key, deadline_s=DEADLINE_S))

    async def _remove_many(self, client: AsyncClient, rng: Random, key: str) -> None:
        keys = rng.sample(sorted(self.keys), rng.randint(0, len(self.keys)))
        with contextlib.ExitStack() as stack:
            removing = [stack.enter_context(self._removing(each)) for each in keys]
            outcomes = await client.remove_many(keys, deadline_s=DEADLINE_S)
            for ended, outcome in zip(removing, outcomes, strict=True):
                if not isinstance(outcome, TanghuluError):
                    ended(outcome)

    async def _remove_matching(self, client: AsyncClient, rng: Random, key: str) -> None:
        prefix = key[: rng.choice((4, 5, 6))]
        with contextlib.ExitStack() as stack:
            keys = [f"key-{number}" for number in range(self.plan.num_keys)]  # those put first meanwhile are meant, too
            keys = [each for each in keys if each.startswith(prefix)]
            removing = [stack.enter_context(self._removing(each)) for each in keys]
            await client.remove_matching(f"^{prefix}", deadline_s=DEADLINE_S)
            for ended in removing:
                ended(None)

    @contextlib.contextmanager
    def _removing(self, key: str) -> Iterator[Callable[[bool | None], None]]:
        """A remove of ``key``; call what it gives with its answer, None if it gave none for this key alone."""
        life = self.keys.setdefault(key, KeyLife())
        is_there, before = life.acked_s is not None and not life.removes_open, life.removes_begun
        with life.removing(self.loop.time, DEADLINE_S + CONVERGE_S) as ended:

            def answered(removed: bool | None) -> None:
                ended(removed is True or self.plan.orderly)  # else it may be on a node that no master knows now
                if removed:
                    life.removed_s = self.loop.time()
                    life.removed_by = [node for node in self.nodes.values() if node.remembers_removal(key)]
                elif removed is False and is_there and self.plan.orderly and not self._makes_room:
                    assert life.removes_begun > before + 1, f"{key} was put, and nobody but this client removes it"

            yield answered

    @property
    def _makes_room(self) -> bool:
        """Whether any node has let chunks go for others."""
        return any(node.state.counters.evictions for node in self.nodes.values())

    # --- what must hold

    def _require_put(self, key: str, value: bytes) -> None:
        life = self.keys.get(key)
        assert life is not None, f"{key} was never put"
        assert value in life.values, f"{key} has {len(value)} bytes that nobody put: {value[:60]!r}"
        if self.plan.calm:
            assert life.read in (None, value), f"{key} has changed its value"
            life.read = value

    def _require_absent(self, key: str, began_s: float) -> None:
        """``key`` was said not to exist; so no holder of an acknowledged put may be in good standing."""
        life = self.keys.get(key)
        if life is None or life.acked_s is None or life.acked_s >= began_s:
            return
        if self.plan.calm:
            self.fail(AssertionError(f"{key} was put at {life.acked_s:.3f} and not found at {began_s:.3f}"))
        calm_s = began_s - CONVERGE_S
        if self._disturbed_s.get(MASTER.host, 0.0) > calm_s:
            return
        for host, node in self.nodes.items():
            if node.alive and self._disturbed_s[host] <= calm_s and self._has_held(node, key, began_s):
                self.fail(AssertionError(f"{key} was put at {life.acked_s:.2f}, {host} has it, and it was not found"))

    def _has_held(self, node: SimNode, key: str, since_s: float) -> bool:
        chunk = node.state.chunks.table.find(key)  # type: ignore[arg-type]
        if chunk is None or node.state.reports.is_unconfirmed(chunk):  # of a put that nobody was told of
            return False
        return chunk.state is ChunkState.LIVE and chunk.created_s < since_s - DEADLINE_S

    async def _settle(self) -> None:
        """Heal everything, wait, and compare the directory with the nodes, and reads with both."""
        self._mend()
        for node in self.nodes.values():
            node.copies = False
        self._restart_masters()
        for host in self.nodes:
            self._restart_node(int(host.partition("-")[2]))
        await asyncio.sleep(CONVERGE_S)
        self._raise()
        self.check()
        self.counts["put in buffers"] = sum(node.state.buffers.num_taken for node in self.nodes.values())
        self.counts["copied"] = sum(node.copier.num_copied for node in self.nodes.values())
        self.counts["copies failed"] = sum(node.copier.num_failed for node in self.nodes.values())
        self.counts["retracted"] = sum(each.core.directory.num_retracted for each in self.masters)
        self.counts["bytes inline"] = sum(node.traffic.bytes_written["inline"] for node in self.nodes.values())
        for host, node in self.nodes.items():
            node.state.drain_buffers()
            node.check_idle()
            held, listed = node.keys, self._listed(host)
            assert listed == held, f"{host} holds {held - listed} more, {listed - held} less than the directory says"
        await on_host("client-0", self._read_all())

    def _listed(self, host: str) -> set[str]:
        """The keys that the masters believe the node there to hold."""
        listed: set[str] = set()
        for master in self.masters:
            directory = master.core.directory
            assert directory.is_ready, f"the directory of {master.host} is not complete"
            page, rest = snapshot(directory, directory.walk(), "", 1 << 20)
            assert not rest
            listed.update(page.get(host, ()))
        return listed

    async def _read_all(self) -> None:
        client = open_client(self, "client-0", "", "the last one")
        try:
            for key, life in self.keys.items():
                holders = [node for node in self.nodes.values() if key in node.keys]
                try:
                    with await client.get(key, deadline_s=DEADLINE_S) as chunk:
                        self._require_put(key, chunk.bytes())
                except ChunkNotFound:
                    assert not holders, f"{key} is on {[h.host for h in holders]} and was not found"
                # Of several puts, an older one may come back with a node that the master had taken for dead.
                if life.gone_s is not None and len(life.values) == 1 and not self._is_forgotten(life, key, holders):
                    assert not holders, f"{key} was removed at {life.gone_s:.2f} and is back"
        finally:
            await client.close()

    def _is_forgotten(self, life: KeyLife, key: str, holders: list[SimNode]) -> bool:
        """Whether all who knew of the removal of ``key`` have died: its master, and the nodes that made it.

        Then a holder that was cut off meanwhile brings it back (docs/tiers.md).
        """
        assert life.gone_s is not None
        if self.restarted_master_s <= life.gone_s or any(node.alive for node in life.removed_by):
            return False
        found = [chunk for node in holders if (chunk := node.find(key))]
        return not any(each.core.directory.is_entombed(key, chunk.version) for each in self.masters for chunk in found)
