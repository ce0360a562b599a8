"""The routes: the page, and the figures that it shows as server-sent events or once as JSON."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import Counter, Histogram
from starlette.responses import Response, StreamingResponse

from tanghulu.conductor.dashboard.cluster import ClusterFigures
from tanghulu.conductor.dashboard.history import History, Totals
from tanghulu.conductor.dispatch.dispatcher import Dispatcher
from tanghulu.conductor.dispatch.registry import RegisteredWorker
from tanghulu.conductor.metrics import ConductorMetrics
from tanghulu.errors import Overloaded
from tanghulu.masters import Masters
from tanghulu.store.dashboard import page as shown
from tanghulu.store.dashboard.events import EventLog
from tanghulu.store.dashboard.page import MAX_POINTS, MAX_SHOWN, PERIOD_S
from tanghulu.version import __version__

#: Pages that are open at one time.
MAX_WATCHERS = 32


class Dashboard:
    """What the page shows. ``observe`` is called once a second, watched or not: then there is a past to show."""

    def __init__(self, dispatcher: Dispatcher, metrics: ConductorMetrics, master: Masters) -> None:
        self._dispatcher, self._metrics = dispatcher, metrics
        self._history = History(_bounds(metrics.ttft), _bounds(metrics.tbt))
        self._events = EventLog()
        self._figures = ClusterFigures(master, self._worker_pages)
        self.num_watchers = 0

    def observe(self) -> None:
        """Take a sample, and note what changed since the last."""
        metrics, at_s = self._metrics, time.time()
        totals = Totals(
            _total(metrics.prompt_tokens),
            _total(metrics.cached_tokens),
            _total(metrics.generated_tokens),
            _total(metrics.requests),
            _total(metrics.migrations, outcome="resumed"),
            len(self._dispatcher.flights()),
            self._dispatcher.num_waiting,
            _buckets(metrics.ttft),
            _buckets(metrics.tbt),
        )
        self._history.append(at_s, totals)
        workers = self._dispatcher.registry.workers.values()
        self._events.states(at_s, "worker", {worker.id: _state(worker) for worker in workers})
        self._events.count(at_s, "migration", totals.moved, "{} requests moved to another worker")

    async def snapshot(self) -> dict[str, Any]:
        """All that the page shows."""
        cluster, at_s = await self._figures.figures(), time.time()
        self._events.states(at_s, "node", {node["id"]: node["state"] for node in cluster["nodes"]})
        self._events.count(at_s, "eviction", cluster["evictions"], "chunks evicted: {}")
        flights = self._dispatcher.flights()
        return {
            "version": __version__,
            "at_s": at_s,
            "now": self._history.now(),
            "points": self._history.points(MAX_POINTS),
            "workers": [_worker(each) for each in self._dispatcher.registry.workers.values()][:MAX_SHOWN],
            "requests": flights[:MAX_SHOWN],
            "num_requests": len(flights),
            "prefixes": self._dispatcher.router.hot.hottest(10, self._dispatcher.now_s),
            "events": self._events.last(MAX_SHOWN),
            **cluster,
        }

    def _worker_pages(self) -> dict[str, str]:
        return {each.id: each.instance.metrics_address for each in self._dispatcher.registry.workers.values()}


def router(dashboard: Dashboard) -> APIRouter:
    """The routes."""
    api = APIRouter()

    @api.get("/dashboard")
    async def page() -> Response:
        """The page: no script, style or picture of it comes from elsewhere."""
        return shown.page()

    @api.get("/dashboard/state")
    async def state() -> Response:
        """What the page shows, once."""
        return shown.once(await dashboard.snapshot())

    @api.get("/dashboard/events")
    async def events(request: Request) -> Response:
        """What the page shows, once a second, as server-sent events."""
        if dashboard.num_watchers >= MAX_WATCHERS:
            raise Overloaded(f"{MAX_WATCHERS} dashboards are open already")
        stands = request.scope.get("state", {}).get("key_stands", lambda: True)
        return StreamingResponse(_states(dashboard, stands), media_type="text/event-stream")

    return api


async def _states(dashboard: Dashboard, stands: Callable[[], bool]) -> AsyncIterator[bytes]:
    """An event a second, as long as the key ``stands`` by which they were asked for."""
    dashboard.num_watchers += 1
    try:
        while stands():
            yield shown.event(await dashboard.snapshot())
            await asyncio.sleep(PERIOD_S)
    finally:
        dashboard.num_watchers -= 1


def _state(worker: RegisteredWorker) -> str:
    return "leaving" if worker.leaving else "connected" if worker.session is not None else "not connected"


def _worker(worker: RegisteredWorker) -> dict[str, Any]:
    load = worker.load.reported
    return {
        "id": worker.id,
        "role": worker.role.value,
        "address": str(worker.instance.address),
        "state": _state(worker),
        "error": worker.last_error,
        "model": worker.card.model if worker.card is not None else "",
        "running": load.num_running,
        "waiting": load.num_waiting,
        "blocks_used": load.blocks_total - load.blocks_free,
        "blocks_total": load.blocks_total,
    }


def _total(counter: Counter, **labels: str) -> float:
    """The counter, summed over all labels but ``labels``."""
    samples = (sample for family in counter.collect() for sample in family.samples)
    return sum(s.value for s in samples if s.name.endswith("_total") and labels.items() <= s.labels.items())


def _bounds(histogram: Histogram) -> list[float]:
    return [bound for bound, _ in _cumulative(histogram)]


def _buckets(histogram: Histogram) -> tuple[float, ...]:
    return tuple(count for _, count in _cumulative(histogram))


def _cumulative(histogram: Histogram) -> list[tuple[float, float]]:
    """(upper end, number of observations up to it), summed over labels, in order."""
    found: dict[float, float] = {}
    for family in histogram.collect():
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                bound = float(sample.labels["le"])
                found[bound] = found.get(bound, 0.0) + sample.value
    return sorted(found.items())
