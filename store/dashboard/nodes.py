"""The store's nodes and their metrics, asked for while somebody watches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tanghulu.auth.credentials import Credentials
from tanghulu.errors import TanghuluError
from tanghulu.runtime.scraping import Samples, scrape
from tanghulu.store.client.model import NodeView

T = TypeVar("T")

#: An answer is so long good for all who ask.
FRESH_S = 1.5
_DEADLINE_S = 3.0


class Recent(Generic[T]):
    """What ``ask`` answers; it is asked anew if the answer is older than ``FRESH_S``, once for all who wait."""

    def __init__(self, ask: Callable[[], Awaitable[T]]) -> None:
        self._ask = ask
        self._asked: asyncio.Task[T] | None = None
        self._asked_s = 0.0

    async def get(self) -> T:
        """The answer."""
        if self._asked is None or time.monotonic() > self._asked_s + FRESH_S:
            self._asked_s = time.monotonic()
            self._asked = asyncio.create_task(self._answered())
        return await asyncio.shield(self._asked)

    async def _answered(self) -> T:
        return await self._ask()


@dataclass(frozen=True, slots=True)
class NodesSeen:
    """The nodes that the master lists, and each process's metrics by its id; ``error``: why the master said nothing."""

    nodes: list[NodeView]
    pages: Mapping[str, Samples | None]
    error: str = ""

    @property
    def rows(self) -> list[dict[str, Any]]:
        """What the page shows of each node."""
        return [_row(node, self.pages.get(node.id)) for node in self.nodes]

    @property
    def silent(self) -> list[str]:
        """Who did not show its metrics."""
        return sorted(name for name, page in self.pages.items() if page is None)

    @property
    def samples(self) -> Samples:
        """All samples of all pages."""
        return [sample for page in self.pages.values() if page is not None for sample in page]


async def see_nodes(
    ask: Callable[[], Awaitable[list[NodeView]]],
    known: list[NodeView],
    others: Mapping[str, str],
    credentials: Credentials,
) -> NodesSeen:
    """Ask for the nodes, and read their metrics and those at ``others`` (address by id).

    Where the master does not answer, the nodes are those that are ``known``.
    """
    error, nodes = "", known
    try:
        async with asyncio.timeout(_DEADLINE_S):
            nodes = await ask()
    except (TanghuluError, TimeoutError) as failure:
        error = getattr(failure, "message", "") or "the master did not answer"
    addresses = dict(others) | {node.id: node.metrics_address for node in nodes}
    pages = dict(zip(addresses, await scrape(addresses.values(), credentials), strict=True))
    return NodesSeen(nodes, pages, error)


def _row(node: NodeView, page: Samples | None) -> dict[str, Any]:
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
