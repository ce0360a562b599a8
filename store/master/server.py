"""The driver of the master, under the calls of both protocols: the clock, the ticks, the waking of followers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from random import Random

import structlog

from tanghulu.discovery.base import Instance
from tanghulu.errors import NotLeader
from tanghulu.runtime.clock import Clock
from tanghulu.store.master.core import Master
from tanghulu.store.master.election.ownership import Ownership
from tanghulu.store.master.metrics import MasterMetrics
from tanghulu.store.protocol.key_slots import NUM_RANGES, ranges_of
from tanghulu.store.protocol.range_map import RangeMap
from tanghulu.store.protocol.terms import Term

_log = structlog.get_logger(__name__)
TICK_S = 0.05
#: Keys swept in one step, about 4 ms; other calls are served in between.
SWEEP_KEYS = 1000
#: Keys checked by the copy planner in a tick while there is anything to copy, about the same time.
WALK_KEYS = 1000
#: Interval at which an incomplete directory logs that, with the first of the nodes that it waits for.
INCOMPLETE_S = 5.0
MAX_NAMED = 8


@dataclass(eq=False)
class MasterServer:
    """The master with its clock, metrics and leadership. Calls change ``master`` and then call ``changed()``."""

    master: Master
    clock: Clock
    metrics: MasterMetrics
    rng: Random
    ownership: Ownership = field(default_factory=Ownership)
    on_tick: list[Callable[[], None]] = field(default_factory=list)
    on_map: list[Callable[[], None]] = field(default_factory=list)  # called when ranges have changed hands
    _changes: asyncio.Event = field(default_factory=asyncio.Event)  # set for a moment
    _published: tuple[int, int, int] = (0, 0, 0)
    _map: RangeMap | None = None  # as of the last tick

    @property
    def now_s(self) -> float:
        """The time passed to every call of the master."""
        return self.clock.now_s()

    def require_owned(self, keys: Iterable[str]) -> None:
        """Raise KeysMoved unless this master owns all of ``keys``, or NotLeader if another one owns everything."""
        if not self.owns(keys):
            raise self.ownership.refusal()

    def owns(self, keys: Iterable[str]) -> bool:
        """Return whether all of ``keys`` are this master's, if several share them."""
        owned = self.ownership.owned
        return len(owned) == NUM_RANGES or owned.issuperset(ranges_of(keys))

    def require_ranges(self, ranges: int) -> None:
        """Do as ``require_owned`` for ranges, a bit for each; 0 means all of them."""
        owned = self.ownership.owned
        if len(owned) < NUM_RANGES and not all(n in owned for n in range(NUM_RANGES) if not ranges or ranges >> n & 1):
            raise self.ownership.refusal()

    def require_newest(self, term: Term) -> None:
        """Raise NotLeader, or KeysMoved, if a caller knows a later term than this master.

        The caller's claim alone deposes no master.
        """
        known = self.ownership.map
        if term.cluster == known.cluster and term.number > known.version:
            raise self.ownership.refusal()

    def require_generation(self, generation: int) -> None:
        """Raise NotLeader unless the master still has its memories of ``generation``."""
        self.ownership.require_lead()
        if self.master.generation != generation:
            raise NotLeader.naming("")

    def lead(self, term: int) -> None:
        """Lead from now on, as one of several masters that share the ranges."""
        self.master.begin_leases(term, self.now_s)
        self.metrics.elections.inc()
        self._wake()

    def lead_no_more(self) -> None:
        """Stop leading: end all streams; the ranges owned by this master stay its own."""
        self.master.begin_leases(0, self.now_s)
        self._wake()

    def own(self, number: int) -> None:
        """Serve a range from now on."""
        self.master.directory.begin_range(number)

    def disown(self, number: int) -> None:
        """Stop serving a range."""
        self.master.directory.forget_range(number)

    def update_nodes(self, nodes: Mapping[str, Instance], admitted: frozenset[str] | None) -> None:
        """Take the nodes in etcd."""
        self.master.update_nodes(nodes, admitted, self.now_s)
        self.changed()

    def changed(self) -> None:
        """Wake the followers if there is anything new for them."""
        directory = self.master.directory
        news = (directory.log.last, self.master.members.last, directory.num_unready)
        if news != self._published:
            self._published = news
            self._wake()

    def _wake(self) -> None:
        self._changes.set()
        self._changes.clear()

    async def wait(self) -> None:
        """Wait until something changed: a new event in either ring, or another range is complete.

        Callers check the state first, without an await in between.
        """
        await self._changes.wait()

    async def news(self) -> None:
        """``wait``; raises NotLeader if this master has stepped down meanwhile."""
        generation = self.master.generation
        await self.wait()
        self.require_generation(generation)

    async def run(self) -> None:
        """Tick and sweep until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._tick())
            tasks.create_task(self._sweep())

    async def _sweep(self) -> None:
        """Clean the directory of lost nodes' entries, in small steps, while everything else continues."""
        while True:
            await asyncio.sleep(TICK_S)
            await self.ownership.keep_admitted(lambda ids: self.master.present_nodes(ids, self.now_s))
            while self.master.directory.sweep(SWEEP_KEYS):
                self.changed()
                await asyncio.sleep(0)
            self.changed()

    async def _tick(self) -> None:
        is_ready, logged_s = False, self.now_s
        while True:
            await asyncio.sleep(TICK_S)
            for instance in self.master.tick(self.now_s, TICK_S):
                self.metrics.expired_leases.labels(instance.role.value).inc()
                _log.warning("lease.expired", instance=instance.id, component=instance.role.value)
            directory, was_ready = self.master.directory, is_ready
            is_ready = directory.is_ready
            if is_ready and not was_ready:
                _log.info("directory.ready", num_keys=directory.num_keys)
            elif is_ready or was_ready or not self.ownership.owned:
                logged_s = self.now_s
            elif self.now_s > logged_s + INCOMPLETE_S:
                logged_s = self.now_s
                known_slots, waits_for = directory.num_known_slots, directory.unreported()[:MAX_NAMED]
                _log.warning("directory.incomplete", known_slots=known_slots, waits_for=waits_for)
            self.master.plan(self.now_s, WALK_KEYS)
            if self.ownership.map is not self._map:
                self._map = self.ownership.map
                for callback in self.on_map:
                    callback()
            for callback in self.on_tick:
                callback()
            self.changed()
