"""What the other processes say of themselves: the store's nodes and everybody's metrics, asked for while watched."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from tanghulu.errors import TanghuluError
from tanghulu.masters import Masters
from tanghulu.runtime.scraping import Samples, scrape, summed_by
from tanghulu.store.client import aio
from tanghulu.store.client.model import NodeView

#: An answer is so long good for all who ask.
FRESH_S = 1.5
_DEADLINE_S = 3.0


class ClusterFigures:
    """The nodes of the store, and figures summed over the metrics of nodes and workers.

    ``worker_pages`` tells where the workers show theirs.
    """

    def __init__(self, master: Masters, worker_pages: Callable[[], Mapping[str, str]]) -> None:
        self._master = master
        self._worker_pages = worker_pages
        self._asked: asyncio.Task[dict[str, Any]] | None = None
        self._asked_s = 0.0
        self.nodes: list[NodeView] = []

    async def figures(self) -> dict[str, Any]:
        """What is known now; asked anew if it is older than ``FRESH_S``, once for all who wait."""
        if self._asked is None or time.monotonic() > self._asked_s + FRESH_S:
            self._asked_s = time.monotonic()
            self._asked = asyncio.create_task(self._ask())
        return await asyncio.shield(self._asked)

    async def _ask(self) -> dict[str, Any]:
        error = ""
        try:
            async with asyncio.timeout(_DEADLINE_S), aio.connect(self._master) as store:
                self.nodes = await store.nodes()
        except (TanghuluError, TimeoutError) as failure:
            error = getattr(failure, "message", "") or "the master did not answer"
        pages = dict(self._worker_pages()) | {node.id: node.metrics_address for node in self.nodes}
        found = dict(zip(pages, await scrape(pages.values()), strict=True))
        samples = [sample for page in found.values() if page is not None for sample in page]
        return {
            "error": error,
            "nodes": [_node(node, found.get(node.id)) for node in self.nodes],
            "silent": sorted(name for name, page in found.items() if page is None),
            "sources": {
                source: value
                for (source,), value in summed_by(samples, "tanghulu_worker_prefix_tokens_total", "source").items()
            },
            "transfers": [
                {"transport": transport, "device": device, "num_bytes": value}
                for (transport, device), value in sorted(
                    summed_by(samples, "tanghulu_transfer_bytes_total", "transport", "device").items()
                )
            ],
            "evictions": sum(summed_by(samples, "tanghulu_node_evictions_total").values()),
        }


def _node(node: NodeView, page: Samples | None) -> dict[str, Any]:
    state = "drained" if node.drained else "draining" if node.draining else "silent" if page is None else "up"
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
