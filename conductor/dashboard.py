"""The page /dashboard of a conductor: requests and workers, and the store's nodes.

The conductor's own figures are sampled once a second whether or not the page is open, so that a history is available.
Other processes are polled only while the page is open.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import Counter, Histogram
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tanghulu.conductor.curves.live import SHOWN_S, LiveCurves, StoreState
from tanghulu.conductor.dispatch.dispatcher import Dispatcher
from tanghulu.conductor.dispatch.registry import RegisteredWorker
from tanghulu.conductor.explain.explainer import Explainer
from tanghulu.conductor.metrics import ConductorMetrics
from tanghulu.errors import Overloaded
from tanghulu.masters import Masters
from tanghulu.runtime.scraping import Samples, summed_by
from tanghulu.store.client import aio
from tanghulu.store.client.model import NodeView
from tanghulu.store.dashboard import page as shown
from tanghulu.store.dashboard.history import History, ratio
from tanghulu.store.dashboard.page import MAX_POINTS, MAX_SHOWN, PERIOD_S
from tanghulu.store.dashboard.view import StoreView

#: Dashboard pages that may be open at once.
MAX_WATCHERS = 32


@dataclass(frozen=True, slots=True)
class Totals:
    """Counters since the conductor's start. Buckets are cumulative, as in Prometheus."""

    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0
    generated_tokens: float = 0.0
    ended: float = 0.0
    moved: float = 0.0
    in_flight: float = 0.0
    queued: float = 0.0
    ttft: tuple[float, ...] = ()
    tbt: tuple[float, ...] = ()


def quantile(share: float, bounds: Sequence[float], counts: Sequence[float]) -> float | None:
    """Return the value below which a ``share`` of the observations lie, like histogram_quantile; None without any.

    ``counts[i]`` observations were at most ``bounds[i]``; the last bound is infinite. Of (1, 2, inf) and counts (5, 10,
    10) the quantile .75 is 1.5: halfway through the second bucket.
    """
    if not counts or counts[-1] <= 0:
        return None
    rank = share * counts[-1]
    at = next(i for i, count in enumerate(counts) if count >= rank)
    below, least = (counts[at - 1], bounds[at - 1]) if at else (0.0, 0.0)
    if at == len(bounds) - 1:
        return least
    return least + (bounds[at] - least) * (rank - below) / max(counts[at] - below, 1e-9)


class RequestHistory(History[Totals]):
    """Samples of the last minutes. ``ttft_bounds`` and ``tbt_bounds`` are the upper bounds of the buckets."""

    def __init__(self, ttft_bounds: Sequence[float], tbt_bounds: Sequence[float]) -> None:
        self._ttft_bounds, self._tbt_bounds = tuple(ttft_bounds), tuple(tbt_bounds)
        super().__init__()
        self._last = Totals()

    def append(self, at_s: float, sample: Totals) -> None:
        """Append a sample."""
        self._last = sample
        super().append(at_s, sample)

    def now(self) -> dict[str, Any]:
        """Return the figures of the last minute and those since the start."""
        if not len(self):
            return {}
        last = self._last
        return super().now() | {
            "hit_ratio_total": ratio(last.cached_tokens, last.prompt_tokens),
            "moved_total": last.moved,
            "ended_total": last.ended,
        }

    def figures(self, seconds: float, first: Totals, last: Totals) -> dict[str, Any]:
        """Return work in progress, rates, quantiles and the cached share of prompt tokens."""
        ttft, tbt = _growth(first.ttft, last.ttft), _growth(first.tbt, last.tbt)
        return {
            "in_flight": last.in_flight,
            "queued": last.queued,
            "requests_per_s": (last.ended - first.ended) / seconds,
            "tokens_per_s": (last.generated_tokens - first.generated_tokens) / seconds,
            "ttft_p50_s": quantile(0.5, self._ttft_bounds, ttft),
            "ttft_p95_s": quantile(0.95, self._ttft_bounds, ttft),
            "tbt_p50_s": quantile(0.5, self._tbt_bounds, tbt),
            "tbt_p95_s": quantile(0.95, self._tbt_bounds, tbt),
            "hit_ratio": ratio(last.cached_tokens - first.cached_tokens, last.prompt_tokens - first.prompt_tokens),
        }


def _growth(first: tuple[float, ...], last: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(b - a for a, b in zip(first, last, strict=True)) if first else last


class Dashboard:
    """The contents of the page. Call ``observe`` once a second."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        metrics: ConductorMetrics,
        master: Masters,
        explainer: Explainer,
        curves: LiveCurves,
    ) -> None:
        self._dispatcher, self._metrics, self._master = dispatcher, metrics, master
        self._explainer, self._curves = explainer, curves
        self._history = RequestHistory(_bounds(metrics.ttft), _bounds(metrics.tbt))
        self._store = StoreView(self._nodes, self._tenants, master.credentials, self._worker_pages)
        self.num_watchers = 0

    def observe(self) -> None:
        """Take a sample and record what changed since the previous one."""
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
        self._store.events.states(at_s, "worker", {worker.id: _state(worker) for worker in workers})
        self._store.events.count(at_s, "migration", totals.moved, "{} requests moved to another worker")

    async def snapshot(self) -> dict[str, Any]:
        """Return the complete contents of the page."""
        store = await self._store.state()
        flights = self._dispatcher.flights()
        return {
            **store,
            **_by_source(self._store.samples),
            "at_s": time.time(),
            "now": self._history.now() | (store["now"] if store["nodes"] else {}),
            "points": self._history.points(MAX_POINTS),
            "workers": [_worker(each) for each in self._dispatcher.registry.workers.values()][:MAX_SHOWN],
            "requests": flights[:MAX_SHOWN],
            "num_requests": len(flights),
            "prefixes": self._dispatcher.router.hot.hottest(10, self._dispatcher.clock.now_s()),
            "misses": self._explainer.summary(),
            "events": self._store.events.last(MAX_SHOWN),
            "curves": await self._curves.report(SHOWN_S) if self._curves.enabled else [],
        }

    async def store_state(self) -> StoreState:
        """Return the memory and the eviction policy of the store. Raises TanghuluError if it does not answer."""
        async with aio.connect(self._master) as store:
            nodes = await store.nodes()
            return StoreState(
                sum(node.capacity_bytes for node in nodes),
                sum(node.ssd_capacity_bytes for node in nodes),
                await store.eviction_policy(nodes[0].id) if nodes else "",
            )

    async def _nodes(self) -> list[NodeView]:
        async with aio.connect(self._master) as store:
            return await store.nodes()

    async def _tenants(self) -> list[dict[str, Any]]:
        async with aio.connect(self._master) as store:
            return [asdict(each) for each in await store.tenants()]

    def _worker_pages(self) -> Mapping[str, str]:
        return {each.id: each.instance.metrics_address for each in self._dispatcher.registry.workers.values()}


def router(dashboard: Dashboard) -> APIRouter:
    """Build the routes."""
    api = APIRouter()

    @api.get("/dashboard")
    async def page() -> Response:
        """Return the page; its scripts, styles and pictures are all local."""
        return shown.page()

    @api.get("/dashboard/state")
    async def state() -> Response:
        """Return the contents of the page once."""
        return shown.once(await dashboard.snapshot())

    @api.get("/dashboard/events")
    async def events(request: Request) -> Response:
        """Stream the contents of the page once a second as server-sent events."""
        if dashboard.num_watchers >= MAX_WATCHERS:
            raise Overloaded(f"{MAX_WATCHERS} dashboards are open already; close one and try again")
        return _Watching(dashboard, request.scope.get("state", {}).get("key_stands", lambda: True))

    return api


class _Watching(Response):
    """A stream of one snapshot per second while the requesting key is valid (``stands``)."""

    def __init__(self, dashboard: Dashboard, stands: Callable[[], bool]) -> None:
        super().__init__()
        self._dashboard, self._stands = dashboard, stands

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._dashboard.num_watchers += 1
        try:
            await shown.stream(self._dashboard.snapshot, self._goes_on)(scope, receive, send)
        finally:
            self._dashboard.num_watchers -= 1

    async def _goes_on(self) -> bool:
        await asyncio.sleep(PERIOD_S)
        return self._stands()


def _by_source(samples: Samples) -> dict[str, Any]:
    """Return cached tokens by source, and bytes received by transport and NIC."""
    found = summed_by(samples, "tanghulu_worker_prefix_tokens_total", "source")
    moved = summed_by(samples, "tanghulu_transfer_bytes_total", "transport", "device")
    return {
        "sources": {source: value for (source,), value in found.items()},
        "transfers": [
            {"transport": transport, "device": device, "num_bytes": value}
            for (transport, device), value in sorted(moved.items())
        ],
    }


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
    """Return the counter summed over all labels except ``labels``."""
    samples = (sample for family in counter.collect() for sample in family.samples)
    return sum(s.value for s in samples if s.name.endswith("_total") and labels.items() <= s.labels.items())


def _bounds(histogram: Histogram) -> list[float]:
    return [bound for bound, _ in _cumulative(histogram)]


def _buckets(histogram: Histogram) -> tuple[float, ...]:
    return tuple(count for _, count in _cumulative(histogram))


def _cumulative(histogram: Histogram) -> list[tuple[float, float]]:
    """Return (upper bound, cumulative number of observations) summed over labels, in order."""
    found: dict[float, float] = {}
    for family in histogram.collect():
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                bound = float(sample.labels["le"])
                found[bound] = found.get(bound, 0.0) + sample.value
    return sorted(found.items())
