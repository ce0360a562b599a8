"""What the other processes say of themselves: the store's nodes and everybody's metrics, asked for while watched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tanghulu.masters import Masters
from tanghulu.runtime.scraping import summed_by
from tanghulu.store.client import aio
from tanghulu.store.client.model import NodeView
from tanghulu.store.dashboard.nodes import Recent, see_nodes


class ClusterFigures:
    """The nodes of the store, and figures summed over the metrics of nodes and workers.

    ``worker_pages`` tells where the workers show theirs.
    """

    def __init__(self, master: Masters, worker_pages: Callable[[], Mapping[str, str]]) -> None:
        self._master = master
        self._worker_pages = worker_pages
        self._recent = Recent(self._ask)
        self.nodes: list[NodeView] = []

    async def figures(self) -> dict[str, Any]:
        """What is known now, or was a moment ago."""
        return await self._recent.get()

    async def _nodes(self) -> list[NodeView]:
        async with aio.connect(self._master) as store:
            return await store.nodes()

    async def _ask(self) -> dict[str, Any]:
        seen = await see_nodes(self._nodes, self.nodes, self._worker_pages(), self._master.credentials)
        self.nodes, samples = seen.nodes, seen.samples
        return {
            "error": seen.error,
            "nodes": seen.rows,
            "silent": seen.silent,
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
