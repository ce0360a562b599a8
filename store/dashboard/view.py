"""The page's view of a store: its nodes and their metrics, requested while somebody watches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from tanghulu.auth.credentials import Credentials
from tanghulu.errors import TanghuluError
from tanghulu.runtime.scraping import Samples, scrape, summed_by
from tanghulu.store.client.model import NodeView
from tanghulu.store.dashboard.history import EventLog, StoreCounters, StoreHistory
from tanghulu.store.dashboard.page import MAX_POINTS, MAX_SHOWN
from tanghulu.version import __version__

#: Seconds for which a state is shown to all watchers before the nodes are called again.
FRESH_S = 1.5
_DEADLINE_S = 3.0


class StoreView:
    """The store as visible to the holder of ``credentials``; its history covers the time it was watched.

    ``list_nodes`` and ``list_tenants`` ask the master. ``others``: addresses of further processes' metrics, by id.
    """

    def __init__(
        self,
        list_nodes: Callable[[], Awaitable[list[NodeView]]],
        list_tenants: Callable[[], Awaitable[list[dict[str, Any]]]],
        credentials: Credentials,
        others: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self.events = EventLog()
        #: All metrics of all processes that answered last time.
        self.samples: Samples = []
        self._list_nodes, self._list_tenants, self._others = list_nodes, list_tenants, others
        self._credentials = credentials
        self._history = StoreHistory()
        self._nodes: list[NodeView] = []
        self._latest: asyncio.Task[dict[str, Any]] | None = None
        self._latest_s = 0.0

    async def state(self) -> dict[str, Any]:
        """Return the page's data about the store, at most ``FRESH_S`` old; requested once for all callers."""
        if self._latest is None or time.monotonic() > self._latest_s + FRESH_S:
            self._latest_s = time.monotonic()
            self._latest = asyncio.create_task(self._look())
        return await asyncio.shield(self._latest)

    async def _look(self) -> dict[str, Any]:
        error = await self._ask_for_nodes()
        addresses = dict(self._others()) | {node.id: node.metrics_address for node in self._nodes}
        pages = dict(zip(addresses, await scrape(addresses.values(), self._credentials), strict=True))
        self.samples = [sample for page in pages.values() if page is not None for sample in page]
        of_nodes = {node.id: page for node in self._nodes if (page := pages[node.id])}
        at_s, rows = time.time(), [_row(node, pages[node.id] is not None) for node in self._nodes]
        self._history.observe(at_s, {name: StoreCounters.on(page) for name, page in of_nodes.items()})
        self._note(at_s, rows)
        return {
            "version": __version__,
            "at_s": at_s,
            "now": self._totals() | (self._history.now() if of_nodes else {}),
            "store_points": self._history.points(MAX_POINTS),
            "events": self.events.last(MAX_SHOWN),
            "error": error,
            "nodes": rows,
            "silent": sorted(name for name, page in pages.items() if page is None),
            **await self._tenants(),
            **_by_label(of_nodes.values()),
        }

    async def _ask_for_nodes(self) -> str:
        """Request the nodes from the master; if it does not answer keep the known ones, and return the reason."""
        try:
            async with asyncio.timeout(_DEADLINE_S):
                self._nodes = await self._list_nodes()
        except (TanghuluError, TimeoutError) as failure:
            return getattr(failure, "message", "") or "the master did not answer"
        return ""

    async def _tenants(self) -> dict[str, Any]:
        """Return the tenants visible to the token; nothing if there are none, or the nodes do not answer."""
        try:
            async with asyncio.timeout(_DEADLINE_S):
                return {"tenants": await self._list_tenants()} if self._nodes else {}
        except (TanghuluError, TimeoutError):
            return {}

    def _totals(self) -> dict[str, Any]:
        return {
            "num_nodes": len(self._nodes),
            "num_chunks": sum(node.num_chunks for node in self._nodes),
            "used_bytes": sum(node.used_bytes for node in self._nodes),
            "ssd_used_bytes": sum(node.ssd_used_bytes for node in self._nodes),
        }

    def _note(self, at_s: float, rows: Iterable[Mapping[str, Any]]) -> None:
        grown = self._history.grown
        self.events.states(at_s, "node", {row["id"]: row["state"] for row in rows})
        self.events.count(at_s, "eviction", grown.evictions, "chunks evicted: {}")
        self.events.count(at_s, "corruption", grown.corrupt_chunks, "corrupt chunks dropped: {}")


def _row(node: NodeView, answers: bool) -> dict[str, Any]:
    state = "drained" if node.drained else "draining" if node.draining else "up" if answers else "silent"
    return {
        "id": node.id,
        "address": str(node.address),
        "state": state,
        "used_bytes": node.used_bytes,
        "capacity_bytes": node.capacity_bytes,
        "ssd_used_bytes": node.ssd_used_bytes,
        "ssd_capacity_bytes": node.ssd_capacity_bytes,
        "num_chunks": node.num_chunks,
    }


def _by_label(pages: Iterable[Samples]) -> dict[str, Any]:
    """Return bytes by transport and evictions by reason, of nodes that expose their metrics; nothing if none does."""
    if not (samples := [sample for page in pages for sample in page]):
        return {}
    moved = {way: summed_by(samples, f"tanghulu_node_{way}_bytes_total", "transport") for way in ("read", "written")}
    evicted = summed_by(samples, "tanghulu_node_evictions_by_reason_total", "reason")
    return {
        "traffic": [
            {"transport": transport, **{f"{way}_bytes": by.get((transport,), 0.0) for way, by in moved.items()}}
            for (transport,) in sorted(moved["read"].keys() | moved["written"].keys())
        ],
        "evictions_by": {reason: number for (reason,), number in sorted(evicted.items())},
    }
