"""Driver of HotPrefixes: asks the masters to copy hot prefixes to more nodes.

A failed request is logged, and repeated while the prefix is hot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import structlog

from tanghulu.conductor.index.events import CacheMirror
from tanghulu.conductor.index.hot_prefixes import ASK_S, HotPrefixes
from tanghulu.errors import TanghuluError
from tanghulu.masters import Masters
from tanghulu.runtime.clock import Clock
from tanghulu.store.client import aio
from tanghulu.types import BlockHash, Fingerprint, kv_chunk_key

_log = structlog.get_logger(__name__)
#: Seconds between two checks for hot prefixes.
PERIOD_S = 1.0
_DEADLINE_S = 5.0

#: (keys, holders, seconds) -> number of keys the store accepted.
RequestCopies = Callable[[Sequence[str], int, float], Awaitable[int]]


class Replicator:
    """Requests copies of hot prefixes: ``look`` once, or ``run`` until cancelled."""

    def __init__(
        self,
        hot: HotPrefixes[BlockHash],
        mirror: CacheMirror,
        request_copies: RequestCopies,
        clock: Clock,
        count: Callable[[int], None],
    ) -> None:
        self._hot, self._mirror, self._request_copies = hot, mirror, request_copies
        self._clock, self._count = clock, count

    async def run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            await self.look()

    async def look(self) -> None:
        """Request the copies needed now, and report to ``count`` how many chunks the store accepted."""
        for copies in self._hot.wanted(self._clock.now_s(), self._num_holders):
            fingerprint = Fingerprint(copies.fingerprint)
            parts = range(self._mirror.num_parts(fingerprint))
            keys = [kv_chunk_key(fingerprint, block, part) for block in copies.blocks for part in parts]
            try:
                num_taken = await self._request_copies(keys, copies.num_holders, ASK_S)
            except TanghuluError as error:
                _log.warning("hot_prefix.not_copied", code=error.code, error=error.message)
                continue
            self._count(num_taken)
            _log.info("hot_prefix.asked_for", blocks=len(copies.blocks), holders=copies.num_holders, taken=num_taken)

    def _num_holders(self, blocks: Sequence[BlockHash]) -> int:
        """Return the number of nodes that hold all of ``blocks``."""
        return sum(num == len(blocks) for num in self._mirror.store.match(blocks).values())


async def request_copies(masters: Masters | str, keys: Sequence[str], holders: int, for_s: float) -> int:
    """Have ``holders`` nodes hold ``keys`` for ``for_s`` seconds; return the number of keys the masters accepted.

    Opens connections for each request, because requests are few. Raises MasterUnavailable, Forbidden without the right
    to write, or InvalidRequest.
    """
    async with aio.connect(masters, deadline_s=_DEADLINE_S) as store:
        return await store.replicate(keys, holders=holders, for_s=for_s)
