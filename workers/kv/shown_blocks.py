"""Blocks that other workers pinned, on their way to where they are read: shown and summed up in threads.

Pins that come in company are small and many: each by itself would wake a thread, and the event loop once more for its
result. So those of one turn of the loop share a thread, as long as they are small; a large one has its own.
Example: pins of 4, 4 and 64 blocks of 1 MiB come at once; the first two, 8 MiB, go together, the third alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import xxhash

from tanghulu.workers.kv.ports import ExportWindow

#: Bytes that are shown together; a pin of more has a thread to itself.
SHARED_BYTES = 8 << 20

#: The xxh3_64 of each layer of each block.
Checksums = list[list[int]]


class _Asked(NamedTuple):
    """Blocks, which are held meanwhile, where they are to be read, and who waits for their checksums."""

    block_ids: Sequence[int]
    offsets: Sequence[int]
    shown: asyncio.Future[Checksums]


class ShownBlocks:
    """Shows blocks of ``layer_bytes`` a layer in ``window``. To be used in the event loop alone."""

    def __init__(self, window: ExportWindow, layer_bytes: int, block_bytes: int) -> None:
        self._window = window
        self._layer_bytes = layer_bytes
        self._block_bytes = block_bytes
        self._asked: list[_Asked] = []
        self._showing: set[asyncio.Future[None]] = set()

    def show(self, block_ids: Sequence[int], offsets: Sequence[int]) -> asyncio.Future[Checksums]:
        """Bring the blocks to their ``offsets``, also if whoever waits for it goes away; gives their checksums."""
        loop = asyncio.get_running_loop()
        if not self._asked:
            loop.call_soon(self._begin)
        shown: asyncio.Future[Checksums] = loop.create_future()
        self._asked.append(_Asked(block_ids, offsets, shown))
        return shown

    async def close(self) -> None:
        """Wait until no thread touches the blocks any more."""
        self._begin()
        await asyncio.gather(*self._showing)

    def _begin(self) -> None:
        for together in self._shares():
            task = asyncio.ensure_future(self._show(together))
            self._showing.add(task)
            task.add_done_callback(self._showing.discard)

    def _shares(self) -> Iterator[list[_Asked]]:
        """What was asked for since the last turn of the loop, in the parts that a thread shows at a time."""
        share: list[_Asked] = []
        num_free = max_blocks = SHARED_BYTES // self._block_bytes
        for each in self._asked:
            if share and len(each.block_ids) > num_free:
                yield share
                share, num_free = [], max_blocks
            share.append(each)
            num_free -= len(each.block_ids)
        if share:
            yield share
        self._asked.clear()

    async def _show(self, together: list[_Asked]) -> None:
        results = await asyncio.to_thread(lambda: [self._checksums(each) for each in together])
        for each, result in zip(together, results, strict=True):
            if each.shown.done():  # whoever waited has gone
                continue
            if isinstance(result, Exception):
                each.shown.set_exception(result)
            else:
                each.shown.set_result(result)

    def _checksums(self, asked: _Asked) -> Checksums | Exception:
        """Show the blocks, in a thread. They are held, so their bytes stay."""
        step = self._layer_bytes
        try:
            views = self._window.show(asked.block_ids, asked.offsets)
            return [[xxhash.xxh3_64_intdigest(v[i : i + step]) for i in range(0, len(v), step)] for v in views]
        except Exception as error:  # noqa: BLE001 - raised where the pin waits; the others of its company are shown
            return error
