"""The shell around HotPrefixes: asks the store to copy ahead what it finds hot.

A wish that fails is said in the log and comes again while the prefix is hot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import structlog

from tanghulu.conductor.index.events import CacheMirror
from tanghulu.conductor.index.hot_prefixes import ASK_S, HotPrefixes
from tanghulu.errors import TanghuluError
from tanghulu.runtime.clock import Clock
from tanghulu.types import BlockHash, Fingerprint, kv_chunk_key

_log = structlog.get_logger(__name__)
#: Between two looks at what is hot.
PERIOD_S = 1.0

#: (keys, holders, seconds) -> how many keys the store took.
AskForCopies = Callable[[Sequence[str], int, float], Awaitable[int]]


class Replicator:
    """``look`` once, or ``run`` until cancelled."""

    def __init__(
        self,
        hot: HotPrefixes[BlockHash],
        mirror: CacheMirror,
        ask: AskForCopies,
        clock: Clock,
        count: Callable[[int], None],
    ) -> None:
        self._hot, self._mirror, self._ask, self._clock, self._count = hot, mirror, ask, clock, count

    async def run(self) -> None:
        """Look every PERIOD_S."""
        while True:
            await asyncio.sleep(PERIOD_S)
            await self.look()

    async def look(self) -> None:
        """Ask for what is wanted now. ``count`` is told how many chunks the store took."""
        for wish in self._hot.wanted(self._clock.now_s(), self._num_holders):
            fingerprint = Fingerprint(wish.fingerprint)
            parts = range(self._mirror.num_parts(fingerprint))
            keys = [kv_chunk_key(fingerprint, block, part) for block in wish.blocks for part in parts]
            try:
                num_taken = await self._ask(keys, wish.num_holders, ASK_S)
            except TanghuluError as error:
                _log.warning("hot_prefix.not_copied", code=error.code, error=error.message)
                continue
            self._count(num_taken)
            _log.info("hot_prefix.asked_for", blocks=len(wish.blocks), holders=wish.num_holders, taken=num_taken)

    def _num_holders(self, blocks: Sequence[BlockHash]) -> int:
        """Nodes that hold all of ``blocks``."""
        return sum(num == len(blocks) for num in self._mirror.store.match(blocks).values())
