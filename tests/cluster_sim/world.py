"""A whole cluster in virtual time: conductors, workers, their store, clients, faults, and what must hold.

One seed is one life. The invariants:

* each request that was taken ends once, with exactly the tokens, the text, the usage and the finish reason that it has
  in a cluster without faults; where a life has limits it may end with an honest error, in time, behind the right
  beginning of its answer; where it has none only what has killed three workers in a row may fail;
* dispatcher, registry, index, engine, block pool and leases are sound (``check``) all the time;
* when all is whole again every request ends, and soon after that nothing is left of any of them: no place in a queue,
  no reservation, block, export, lease, pull, task or thread; each conductor's index says what is in each cache;
* the moves that a conductor counts are those that it made.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import Any
from unittest import mock

import structlog

from tanghulu.runtime.clock import SystemClock
from tanghulu.workers.engine import thread as engine_thread
from tanghulu.workers.kv import connector, peer_links, peer_reader
from tanghulu.workers.mock import runner
from tanghulu.workers.sessions import reports
from tanghulu.workers.sessions.server import ConductorSession
from tests.cluster_sim import store, text
from tests.cluster_sim.client import SimClient
from tests.cluster_sim.conductor import SimConductor
from tests.cluster_sim.plan import Plan
from tests.cluster_sim.process import Process, make_task
from tests.cluster_sim.worker import SUPERVISED_S, SimConnection, SimWorker
from tests.discovery.memory import MemoryRegistry
from tests.virtual.loop import VirtualLoop
from tests.virtual.surroundings import collected_garbage, virtual_time
from tests.virtual.threads import OWNER, Threads, patched

#: Small, so that even short messages meet peers that have not taken the ones before.
MOST_ON_THE_WAY = 2
_THREADED = (engine_thread, reports, connector, peer_links, peer_reader, runner)
_TICK_S = 0.05
_CHECK_EVERY_S = 0.2
_GARBAGE_EVERY_S = 2.0
#: When all is whole, so long until every request has ended, and until nothing is left of any.
ALL_END_S = 90.0
ALL_GIVEN_BACK_S = 75.0
#: The same where nothing fails: nobody waits for a time limit that stands behind a lost message.
CALM_GIVEN_BACK_S = 3.0


class World:
    """See the module. ``run`` lives one seed's life; it raises AssertionError that names what did not hold."""

    def __init__(self, seed: int, plan: Plan | None = None) -> None:
        self.seed = seed
        self.rng = Random(seed)
        self.plan = plan or Plan.of(self.rng)
        self.loop = VirtualLoop(Random(self.rng.random()))
        self.loop.set_task_factory(make_task)  # type: ignore[arg-type]
        self.network = self.loop.network
        self.network.reset_s = self.plan.reset_s
        self.network.most_on_the_way = MOST_ON_THE_WAY
        self.threads = Threads(self.loop, Random(self.rng.random()))
        self.counts: Counter[str] = Counter()
        self.workers: list[SimWorker] = []
        self.conductors: list[SimConductor] = []
        #: Names of all blocks that were requested, or answered; and by request how many of its leading ones had been.
        self.requested: set[bytes] = set()
        self.known_blocks: dict[str, int] = {}
        self.shared = text.prefixes(self.rng)
        self.closing = self.ended = False
        self.num_breaks = 0
        self.instances: MemoryRegistry
        self.store = store.SimStore(self, Random(self.rng.random()))
        self._generation = 0
        self._numbers = itertools.count(1)
        self._failure: BaseException | None = None

    def run(self) -> Counter[str]:
        """One life; returns how often what happened."""
        with self._surroundings():
            self.loop.set_exception_handler(self._unhandled)
            try:
                self.loop.run_until_complete(self._live())
            except AssertionError as error:
                self.fail(error)
            finally:
                self.ended = True
                for process in (*self.workers, *self.conductors):
                    process.alive = False
                self.threads.close()
                while tasks := asyncio.all_tasks(self.loop):
                    for task in tasks:
                        task.cancel()
                    self.loop.run_until_complete(asyncio.sleep(1))
                self.threads.close()  # those that tasks began as they ended
                self.loop.close()
        self._raise()
        return self.counts

    @contextlib.contextmanager
    def _surroundings(self) -> Iterator[None]:
        numbers: dict[int, int] = {}

        def numbered(session: ConductorSession) -> int:  # sets of sessions are in one order whatever their addresses
            return numbers.setdefault(id(session), len(numbers))

        place = peer_links._Place

        def new_place() -> peer_links._Place:  # its lock was chosen when the class was made
            return place(opening=self.threads.Lock())  # type: ignore[arg-type]

        with (
            virtual_time(self),
            collected_garbage(),
            patched(self.threads, self.loop, *_THREADED),
            mock.patch.object(peer_links, "FastConnection", SimConnection),
            mock.patch.object(SimConnection, "threads", self.threads, create=True),
            mock.patch.object(peer_links, "_Place", new_place),
            mock.patch.object(ConductorSession, "__hash__", numbered),
        ):
            structlog.configure(
                wrapper_class=structlog.make_filtering_bound_logger(20),
                processors=[self._log],
                cache_logger_on_first_use=False,
            )
            yield

    def _log(self, logger: Any, level: str, event: dict[str, Any]) -> Any:
        """Count the moves; a bug that the product caught and logged is a failure."""
        owner = OWNER.get()
        if not (self.ended or (isinstance(owner, Process) and not owner.alive)):
            if event["event"] == "request.redispatched" and event["loss"] != "refused":
                assert isinstance(owner, SimConductor)
                owner.moves += 1
                self.counts[f"moved: {event['loss']}"] += 1
            if level in ("error", "critical", "exception"):
                self.fail(AssertionError(f"logged: {event}"))
        raise structlog.DropEvent

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception") or AssertionError(f"{context['message']} {context.get('task', '')!r}")
        if not self.ended:
            self.fail(error)

    def clock_s(self) -> float:
        """The time; all hosts have the same."""
        return self.loop.time()

    def fail(self, error: BaseException) -> None:
        """Remember the first thing that went wrong."""
        if self._failure is None and not self.ended:
            self._failure = error

    def _raise(self) -> None:
        if self._failure is not None:
            at_s = self.loop.time() - 1000
            raise AssertionError(f"seed {self.seed} at {at_s:.1f} s: {self._failure!r}; {self.plan}") from self._failure

    # --- what clients ask

    def next_number(self) -> int:
        """The number of a new request."""
        return next(self._numbers)

    def some_conductor(self, rng: Random) -> SimConductor | None:
        """A conductor that accepts connections."""
        alive = [conductor for conductor in self.conductors if conductor.alive]
        return rng.choice(alive) if alive else None

    # --- life

    async def _live(self) -> None:
        plan = self.plan
        await self._begin()
        clients = [SimClient(number, self, Random(self.rng.random())) for number in range(plan.num_clients)]
        tasks = [asyncio.create_task(client.live()) for client in clients]
        ends_s = self.loop.time() + plan.seconds
        next_fault_s = self.loop.time() + self.rng.expovariate(1 / plan.fault_every_s)
        while self.loop.time() < ends_s:
            await self._tick(tasks)
            if plan.faults and self.loop.time() >= next_fault_s:
                next_fault_s = self.loop.time() + self.rng.expovariate(1 / plan.fault_every_s)
                self._fault()
        self.closing = True
        self._mend()
        await self._all_end(tasks)
        await self._all_given_back()
        self._check_counters()
        gc.collect()  # a task that nobody refers to is destroyed, and was lost
        self._raise()

    async def _begin(self) -> None:
        """Start all processes, and wait until they know each other."""
        self.instances = MemoryRegistry(SystemClock())
        for number in range(self.plan.num_conductors):
            self.conductors.append(SimConductor(number, self))
        for number in range(len(self.plan.roles)):
            self.workers.append(self._new_worker(number))
        await asyncio.sleep(0.5)

    async def _tick(self, clients: list[asyncio.Task[None]]) -> None:
        await asyncio.sleep(_TICK_S)
        for task in clients:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                self.fail(error)
        self._raise()
        self.instances.tick()
        self._supervise()
        ticks = round(self.loop.time() / _TICK_S)
        if ticks % round(_CHECK_EVERY_S / _TICK_S) == 0:
            self.check()
        if ticks % round(_GARBAGE_EVERY_S / _TICK_S) == 0:
            gc.collect(1)

    def check(self) -> None:
        """Assert the invariants of everybody who is alive."""
        for process in (*self.workers, *self.conductors):
            if process.alive:
                (process if isinstance(process, SimWorker) else process.dispatcher).check()

    def _supervise(self) -> None:
        """Kill workers whose engines have hung for too long, as `tanghulu up` does."""
        for worker in self.workers:
            if worker.alive and self.loop.time() > worker.alive_s + SUPERVISED_S:
                self.counts["supervised"] += 1
                self._kill(worker, silently=False)

    async def _all_end(self, clients: list[asyncio.Task[None]]) -> None:
        until_s = self.loop.time() + ALL_END_S
        while not all(task.done() for task in clients):
            await self._tick(clients)
            if self.loop.time() > until_s:
                under_way = [flight for each in self.conductors for flight in each.dispatcher.flights()]
                raise AssertionError(f"{len(under_way)} requests hang: {under_way}")
        await self._tick(clients)

    async def _all_given_back(self) -> None:
        until_s = self.loop.time() + (CALM_GIVEN_BACK_S if self.plan.calm else ALL_GIVEN_BACK_S)
        while True:
            await self._tick([])
            try:
                for process in (*self.workers, *self.conductors):
                    process.check_idle()
                self._check_caches()
                self._check_tasks()
            except AssertionError:
                if self.loop.time() > until_s:
                    raise
                await asyncio.sleep(0.5)
                continue
            return

    def _check_caches(self) -> None:
        """Every conductor knows every cache, and the store."""
        for conductor in self.conductors:
            mirror = conductor.dispatcher.mirror
            for worker in self.workers:
                known, there = mirror.workers.blocks_of(worker.id), set(worker.core.scheduler.pool.matchable_hashes())
                assert known == there, (
                    f"{conductor.host} misses {len(there - known)} blocks of {worker.host} and imagines "
                    f"{len(known - there)}"
                )
                registered = conductor.dispatcher.registry.workers.get(worker.id)
                assert registered is not None, f"{conductor.host} does not know {worker.host}"
                assert registered.usable, f"{conductor.host} cannot use {worker.host}: {registered.last_error}"
            assert mirror.store.num_blocks == len(self.store.chunks), "the store's index is wrong"

    def _check_tasks(self) -> None:
        for worker in self.workers:
            # a stream of each conductor is written and read; beats and the sweep
            assert len(worker.tasks) <= 2 + 2 * len(self.conductors), f"{worker.host} still has {list(worker.tasks)}"
            num_threads = self.threads.num_alive(worker)
            assert num_threads == 1, f"{worker.host} has {num_threads} threads, not the engine's alone"
        for conductor in self.conductors:
            # a session of each worker is served and written; four of its own
            most = 4 + 2 * len(self.workers)
            assert len(conductor.tasks) <= most, f"{conductor.host} still has {list(conductor.tasks)}"

    def _check_counters(self) -> None:
        failed = sum(self.counts[each] for each in ("node_unavailable", "request_kills_workers", "deadline_exceeded"))
        for conductor in self.conductors:
            counted = sum(conductor.counted_moves.values())
            assert conductor.moves <= counted <= conductor.moves + failed, (
                f"{conductor.host} counts {conductor.counted_moves}, and moved {conductor.moves}"
            )

    # --- who comes and goes

    def _new_worker(self, number: int) -> SimWorker:
        self._generation += 1
        return SimWorker(number, self, self.plan.roles[number], self._generation)

    def _restart_worker(self, number: int) -> None:
        if not self.workers[number].alive:
            self.workers[number] = self._new_worker(number)

    def _restart_conductor(self, number: int) -> None:
        if not self.conductors[number].alive:
            self.conductors[number] = SimConductor(number, self)

    def _kill(self, worker: SimWorker, *, silently: bool) -> None:
        if worker.alive:
            worker.kill(silently=silently)
            self.loop.call_later(self.rng.uniform(0.1, 2), self._restart_worker, worker.number)

    async def _drain(self, worker: SimWorker, grace_s: float) -> None:
        await worker.drain(grace_s)
        self._restart_worker(worker.number)

    # --- faults

    def _fault(self) -> None:
        kind = self.rng.choice(self.plan.faults)
        self.counts[kind] += 1
        worker = self.rng.choice(self.workers)
        conductor = self.rng.choice(self.conductors)
        rng, later = self.rng, self.loop.call_later
        match kind:
            case "kill" | "silent":
                self._kill(worker, silently=kind == "silent")
            case "drain" if worker.alive and not worker.draining:
                worker.spawn(self._drain(worker, rng.choice((0.0, 0.3, 3.0))))
            case "tear":
                self.num_breaks += 1
                for pipe in [p for p in self.network.pipes if worker.host in (p.host, p.peer.host)]:
                    if rng.random() < 0.5:
                        self.network.tear(pipe, ConnectionResetError("torn"))
            case "cut":
                others = [each.host for each in (*self.workers, *self.conductors) if each is not worker]
                self._cut(worker.host, rng.choice([*others, store.HOST]), rng.uniform(0.2, 4))
            case "hole":
                for each in self.conductors:
                    self._cut(worker.host, each.host, rng.uniform(3, 8))
            case "slow":
                self.network.slow(worker.host, rng.uniform(20, 200))
                later(rng.uniform(0.5, 3), self.network.slow, worker.host, 1.0)
            case "crawl":
                worker.slowness = 8.0
                later(rng.uniform(0.5, 3), setattr, worker, "slowness", 1.0)
            case "hang":
                worker.hangs = True
                later(rng.uniform(0.3, 8), setattr, worker, "hangs", False)
            case "conductor" if conductor.alive:
                conductor.kill(silently=rng.random() < 0.3)
                later(rng.uniform(0.2, 2), self._restart_conductor, conductor.number)
            case "store":
                self.store.away = True
                later(rng.uniform(0.3, 3), setattr, self.store, "away", False)
            case "lease" if worker.alive and not worker.draining:
                worker.spawn(self._lose_lease(worker))
            case "mend":
                self._mend_network()

    async def _lose_lease(self, worker: SimWorker) -> None:
        await worker.registration.close()
        await asyncio.sleep(self.rng.uniform(0.1, 3))
        if not worker.draining:
            await worker.register()

    def _cut(self, one: str, other: str, seconds: float) -> None:
        self.num_breaks += 1
        self.network.cut(one, other)
        self.loop.call_later(seconds, self.network.mend, one, other)

    def _mend_network(self) -> None:
        self.network.mend_all()

    def _mend(self) -> None:
        """All is whole again: who hangs goes on, who is gone comes back."""
        self._mend_network()
        self.store.away = False
        for worker in self.workers:
            worker.hangs, worker.slowness = False, 1.0
        for worker in self.workers:
            self._restart_worker(worker.number)
        for conductor in self.conductors:
            self._restart_conductor(conductor.number)
