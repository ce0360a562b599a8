"""A simulated conductor: the product's dispatcher and what it owns, with the tasks that `tanghulu.conductor.main` runs
beside it. Its clients call it as the HTTP layer does, by `GenerationCall`."""

from __future__ import annotations

import asyncio
from typing import Any

from prometheus_client import CollectorRegistry

from tanghulu.conductor.dispatch.dispatcher import Dispatcher
from tanghulu.conductor.dispatch.entry import Limits
from tanghulu.conductor.dispatch.lifecycle import Flight, MoveLimits
from tanghulu.conductor.dispatch.router import RoutedRequest
from tanghulu.conductor.explain.explainer import Asked, Explainer
from tanghulu.conductor.metrics import ConductorMetrics
from tanghulu.conductor.routing.overrides import RoutingPolicies, parse_weights
from tanghulu.conductor.routing.requests import Timeouts
from tanghulu.conductor.stories.account import Cause, Explanation, Source
from tanghulu.conductor.text.served_model import ServedModel
from tanghulu.runtime.clock import SystemClock
from tanghulu.store.directory_feed import DirectoryEvent
from tests.cluster_sim.process import Process
from tests.discovery.memory import MemoryDiscovery

WORKER_TIMEOUT_S = 3.0
SNAPSHOT_EVERY_S = 2.0
#: Memory for prompts, more than a life fills.
EXPLAIN_BYTES = 64 << 20


class CheckedExplainer(Explainer):
    """An explainer that is compared with what all clients of the world have requested so far, and been answered."""

    _world: Any

    def begin(self, world: Any) -> None:
        self._world = world
        self.misses_requests = bool(world.requested)

    @property
    def knows_all(self) -> bool:
        return super().knows_all and len(self._world.conductors) <= 1

    def routed(self, before: Any, flight: Flight, model: ServedModel, route: RoutedRequest) -> Asked:
        requested = self._world.requested
        asked = super().routed(before, flight, model, route)
        if before is None:
            truth = next((at for at, name in enumerate(asked.names) if name not in requested), len(asked.names))
            assert asked.known <= truth, f"{flight.request.id} has {truth} known blocks, not {asked.known}"
            assert asked.known == truth or not self.knows_all
            self._world.known_blocks[flight.request.id] = truth
            requested.update(asked.names)
        return asked

    def ended(self, asked: Asked, flight: Flight, model: ServedModel, outcome: str) -> Explanation | None:
        name, explained = flight.request.id, super().ended(asked, flight, model, outcome)
        self._world.requested.update(flight.known_blocks)
        truth = self._world.known_blocks.pop(name)
        if explained is None:
            return None
        at = 0
        for run in explained.runs:
            assert (run.start, run.tokens > 0) == (at, True), explained
            at += run.tokens
            self._world.counts[f"tokens {run.why.name.lower()}"] += run.tokens
            if run.certain and run.why in (Cause.NEW, Cause.DIVERGED, Cause.OTHER_NAME):
                assert run.start // model.card.block_tokens >= truth, f"{name}: {run} was requested before"
            elif run.certain and isinstance(run.why, Cause) and run.why is not Cause.TAIL:
                assert (at - 1) // model.card.block_tokens < max(truth, asked.plan.held), f"{name}: {run} is new"
        assert at == len(flight.request.prompt), explained
        cached = sum(run.tokens for run in explained.runs if isinstance(run.why, Source))
        assert cached == min(flight.cached_tokens or 0, at), explained
        return explained


class SimConductor(Process):
    """A conductor; ``gone`` is set when it dies."""

    def __init__(self, number: int, world: Any) -> None:
        super().__init__(f"conductor-{number}", world.network)
        self.number = number
        self.gone = asyncio.Event()
        self.moves = self.last_moves = 0
        self._world = world
        self.run(self._open)

    def _open(self) -> None:
        plan = self._world.plan
        limits = Limits(
            max_in_flight=plan.max_in_flight,
            queue_timeout_s=plan.queue_timeout_s,
            moves=MoveLimits(plan.moves),
            timeouts=Timeouts(request_s=plan.timeout_s),
            worker_timeout_s=WORKER_TIMEOUT_S,
        )
        self.metrics_registry = CollectorRegistry()
        policies = RoutingPolicies(plan.policy, parse_weights("", self.host))
        metrics = ConductorMetrics(self.metrics_registry)
        self.dispatcher = Dispatcher(self.host, policies, metrics, limits, SystemClock())
        CheckedExplainer(self.dispatcher, EXPLAIN_BYTES, metrics, shows_text=False).begin(self._world)
        for event in self._world.store.snapshot():
            self.dispatcher.mirror.directory_event(event)
        discovery = MemoryDiscovery(self._world.instances)
        registry = self.dispatcher.registry
        for coroutine in (
            registry.follow(discovery, "default"),
            registry.watch_engines(),
            self.dispatcher.mirror.apply_events(),
            self._request_snapshots(),
        ):
            task = self.spawn(coroutine)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if self.alive and not self._world.ended:
            error = None if task.cancelled() else task.exception()
            self._world.fail(error or AssertionError(f"{self.host}: {task!r} has ended"))

    async def _request_snapshots(self) -> None:
        while True:
            await asyncio.sleep(SNAPSHOT_EVERY_S)
            self.dispatcher.registry.request_snapshots()

    def store_event(self, event: DirectoryEvent) -> None:
        """Hear of the store's directory."""
        if self.alive:
            self.dispatcher.mirror.directory_event(event)

    def kill(self, *, silently: bool = False) -> None:
        super().kill(silently=silently)
        self.gone.set()

    @property
    def counted_moves(self) -> dict[tuple[str, str], int]:
        """The moves that its metrics tell, by kind and outcome."""
        found: dict[tuple[str, str], int] = {}
        for family in self.metrics_registry.collect():
            for sample in family.samples:
                if sample.name == "tanghulu_migrations_total":
                    name = sample.labels["kind"], sample.labels["outcome"]
                    found[name] = found.get(name, 0) + int(sample.value)
        return found

    def check_idle(self) -> None:
        """Assert that nothing is left of any request."""
        dispatcher = self.dispatcher
        dispatcher.check()
        left: dict[str, Any] = {
            "requests": dispatcher.num_requests,
            "waiting": dispatcher.num_waiting,
            "submissions": len(dispatcher._submissions),
            "own": len(dispatcher.own),
            "in flight": len(dispatcher.router.in_flight),
        }
        for worker in dispatcher.registry.workers.values():
            load = worker.load
            left[f"reserved at {worker.id}"] = len(load._reserved)
            left[f"unreported at {worker.id}"] = len(load._unreported)
            left[f"expected at {worker.id}"] = load.expected_blocks
        found = {name: count for name, count in left.items() if count}
        assert not found, f"{self.host} still has {found}"
