"""The driver of the master, under the calls of both protocols: the clock, the ticking, the wake-up of followers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import structlog

from tanghulu.errors import NotLeader
from tanghulu.runtime.clock import Clock
from tanghulu.store.master.core import Master
from tanghulu.store.master.election.leadership import Leadership
from tanghulu.store.master.metrics import MasterMetrics
from tanghulu.store.protocol.terms import Term

_log = structlog.get_logger(__name__)
TICK_S = 0.05
#: Keys that are swept in one go, about 4 ms; other calls get their turn in between.
SWEEP_KEYS = 1000
#: Keys that the copy planner looks at in a tick while there is anything to copy, about as long.
WALK_KEYS = 1000
#: As often a directory that is not complete yet says so, and which nodes it waits for, the first of them.
INCOMPLETE_S = 5.0
MAX_NAMED = 8


class Signal:
    """Wakes all who wait. A waiter looks at the state first, then waits, without an await in between."""

    def __init__(self) -> None:
        self._event: asyncio.Event | None = None

    def fire(self) -> None:
        """Wake all who wait now."""
        event, self._event = self._event, None
        if event is not None:
            event.set()

    async def wait(self) -> None:
        """Wait until the next ``fire``."""
        if self._event is None:
            self._event = asyncio.Event()
        await self._event.wait()


@dataclass(eq=False)
class MasterServer:
    """The master with its clock, metrics and leadership. Calls change ``master`` and then call ``changed()``."""

    master: Master
    clock: Clock
    metrics: MasterMetrics
    rng: Random
    leadership: Leadership | None = None  # None: the only master
    on_tick: list[Callable[[], None]] = field(default_factory=list)
    on_step_down: list[Callable[[], None]] = field(default_factory=list)
    _changed: Signal = field(default_factory=Signal)
    _told: tuple[int, int, bool] = (0, 0, False)

    @property
    def now_s(self) -> float:
        """The time that every call of the master is given."""
        return self.clock.now_s()

    def require_leadership(self) -> None:
        """Raise NotLeader if this is one of several masters and does not lead."""
        if self.leadership is not None:
            self.leadership.require()

    @property
    def term(self) -> Term:
        """The term that every reply carries."""
        return Term() if self.leadership is None else Term(self.leadership.term, self.leadership.cluster)

    def require_newest(self, number: int, cluster: int) -> None:
        """Raise NotLeader if a caller knows of a later term than this master's; its word alone deposes nobody."""
        self.require_leadership()
        if self.leadership is not None and cluster == self.leadership.cluster and number > self.leadership.term:
            raise NotLeader.naming("")

    def require_generation(self, generation: int) -> None:
        """Raise NotLeader unless the master still has the memories that it had as ``generation``."""
        self.require_leadership()
        if self.master.generation != generation:
            raise NotLeader.naming("")

    def begin_term(self, term: int, known_nodes: frozenset[str] | None) -> None:
        """Lead from now on, with empty memories."""
        self.master.begin(term, self.now_s, known_nodes)
        self.metrics.elections.inc()
        self._changed.fire()

    def step_down(self) -> None:
        """Lead no longer: forget everything and end all streams."""
        self.master.begin(0, self.now_s)
        for callback in self.on_step_down:
            callback()
        self._changed.fire()

    def changed(self) -> None:
        """Wake the followers if there is anything new for them."""
        directory = self.master.directory
        news = (directory.log.last, self.master.members.last, directory.is_ready)
        if news != self._told:
            self._told = news
            self._changed.fire()

    async def news(self) -> None:
        """Wait until something changed: a new event in either ring, or the directory is complete.

        Raises NotLeader when this master has stepped down meanwhile.
        """
        generation = self.master.generation
        await self._changed.wait()
        self.require_generation(generation)

    async def run(self) -> None:
        """Tick and sweep until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._tick())
            tasks.create_task(self._sweep())

    async def _sweep(self) -> None:
        """Clean the directory of what lost nodes held, in small steps, while everything else goes on."""
        while True:
            await asyncio.sleep(TICK_S)
            if self.leadership is not None and self.leadership.leads:
                await self._forget_gone_nodes(self.leadership)
            while self.master.directory.sweep(SWEEP_KEYS):
                self.changed()
                await asyncio.sleep(0)
            self.changed()

    async def _tick(self) -> None:
        is_ready, told_s = False, self.now_s
        while True:
            await asyncio.sleep(TICK_S)
            for instance in self.master.tick(self.now_s, TICK_S):
                self.metrics.expired_leases.labels(instance.role.value).inc()
                _log.warning("lease.expired", instance=instance.id, component=instance.role.value)
            directory, was_ready = self.master.directory, is_ready
            is_ready = directory.is_ready
            if is_ready and not was_ready:
                _log.info("directory.ready", num_keys=directory.num_keys)
            elif is_ready or was_ready:
                told_s = self.now_s
            elif self.now_s > told_s + INCOMPLETE_S:
                told_s = self.now_s
                known_slots, waits_for = directory.num_known_slots, directory.unreported()[:MAX_NAMED]
                _log.warning("directory.incomplete", known_slots=known_slots, waits_for=waits_for)
            self.master.plan(self.now_s, WALK_KEYS)
            for callback in self.on_tick:
                callback()
            self.changed()

    async def _forget_gone_nodes(self, leadership: Leadership) -> None:
        """Take nodes that are gone out of the admitted ones, once it is known which nodes are there."""
        directory = self.master.directory
        if directory.is_ready and len(leadership.admitted) > directory.num_nodes:
            await leadership.admitted.keep(lambda: frozenset(directory.candidates()))
