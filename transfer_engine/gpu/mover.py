"""Moves blocks between the memory of devices and anything that reads or writes buffers in main memory, in k threads.

A block is a row of each of its parts: one part where a cache keeps a block in one piece, one for each rank, or one for
each layer, as engines do whose cache has a tensor for each layer (vLLM: 32 KiB of a layer's K or V). In a ring and
outside a block is contiguous, its parts side by side, so many small pieces cross the link as one
(`staging.DeviceCopier.gather`).

A call passes its blocks through a ring of its own (`staging.StagingRing`), in which the device copies one half while
the other is being moved. A single thread moves them at the speed of one core's copies, a fraction of the link, so a
call whose mover of bytes is *shareable* also takes idle helpers, each a thread with a ring of its own, and gives each
of them a run of the blocks. Helpers are never waited for: a call without any goes on alone.
"""

from __future__ import annotations

import logging
import queue
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager

from tanghulu.errors import TanghuluError
from tanghulu.transfer_engine.gpu.staging import MIB, DeviceBlocks, StagingRing
from tanghulu.transfer_engine.gpu.staging_plan import Piece, StagingEvent

_log = logging.getLogger(__name__)

#: Moves some of the named blocks, starting from a number, into or out of these buffers (one each); returns the number
#: of leading ones that it moved.
Move = Callable[[int, Sequence[memoryview]], int]

#: Bytes of a shareable call moved at a time by a thread: more would leave the caches before they are copied on, and a
#: load of few rounds would be neither shared nor copied meanwhile. Others move half a ring: they may have far to go.
_ROUND_BYTES = 4 * MIB


class BlockMover:
    """Moves ``blocks``. Each of ``rings`` serves one caller at a time, others wait for the next free one.

    ``helpers`` are the rings of as many further threads, which shareable calls use while they are idle; `close` ends
    the threads.
    """

    def __init__(self, blocks: DeviceBlocks, rings: Sequence[StagingRing], helpers: Sequence[StagingRing] = ()) -> None:
        self._blocks = blocks
        self._free: queue.SimpleQueue[StagingRing] = queue.SimpleQueue()
        self._idle: queue.SimpleQueue[StagingRing] = queue.SimpleQueue()
        for each, where in (*((ring, self._free) for ring in rings), *((ring, self._idle) for ring in helpers)):
            assert each.half_bytes >= blocks.block_bytes, "a half holds at least a block"
            where.put(each)
        self._threads = ThreadPoolExecutor(len(helpers), "mover") if helpers else None

    def fill(self, block_ids: Sequence[int], move: Move, *, shareable: bool = False) -> int:
        """Let ``move`` write some blocks at a time, and copy them to the device; return how many leading ones are done.

        Those are in place when this returns; the others are unchanged, or written too if the call is ``shareable``:
        several threads may then call ``move`` at once, for different blocks. Raises what ``move`` raises, unless blocks
        came before that.
        """
        return self._pass(block_ids, move, StagingEvent.DRAIN, shareable)

    def drain(self, block_ids: Sequence[int], move: Move, *, shareable: bool = False) -> int:
        """Copy some blocks at a time from the device, and let ``move`` read them; return how many leading ones it read.

        Nothing reads them when this returns. ``shareable`` as in `fill`. Raises what ``move`` raises.
        """
        return self._pass(block_ids, move, StagingEvent.FILL, shareable)

    def close(self) -> None:
        """End the helpers' threads, when their calls have ended."""
        if self._threads is not None:
            self._threads.shutdown()

    # --- inside

    def _pass(self, block_ids: Sequence[int], move: Move, copying: StagingEvent, shareable: bool) -> int:
        """Pass blocks through rings, with device copies out of them (DRAIN) or into them (FILL): see ``copying``."""
        if not block_ids:
            return 0
        num_rounds = -(-len(block_ids) * self._blocks.block_bytes // _ROUND_BYTES)
        most = _ROUND_BYTES if shareable else sys.maxsize
        with self._own_ring() as own, self._helpers(num_rounds - 1 if shareable else 0) as helpers:
            rings = [own, *helpers]
            bounds = [len(block_ids) * at // len(rings) for at in range(len(rings) + 1)]
            passages = [
                _Passage(self._blocks, block_ids[first:end], first, move, copying, ring)
                for ring, first, end in zip(rings, bounds, bounds[1:], strict=False)
            ]
            assert self._threads is not None or not helpers
            others = [self._threads.submit(each.run, most) for each in passages[1:]] if self._threads else []
            try:
                passages[0].run(most)
            finally:
                wait(others)
            for each in others:
                each.result()
            return _num_leading(passages)

    @contextmanager
    def _own_ring(self) -> Iterator[StagingRing]:
        ring = self._free.get()
        try:
            yield ring
        finally:
            self._free.put(ring)

    @contextmanager
    def _helpers(self, most: int) -> Iterator[list[StagingRing]]:
        """Take at most ``most`` rings of idle helpers."""
        taken: list[StagingRing] = []
        try:
            while len(taken) < most:
                try:
                    taken.append(self._idle.get_nowait())
                except queue.Empty:
                    break
            yield taken
        finally:
            for ring in taken:
                self._idle.put(ring)


class _Passage:
    """Blocks number ``first`` and after of a call, passing through a ring.

    ``num_moved`` leading ones have moved, none after a failure. A failure to fill ends it with the blocks before it, if
    there is at least one in the call, or else is raised.
    """

    def __init__(
        self,
        blocks: DeviceBlocks,
        block_ids: Sequence[int],
        first: int,
        move: Move,
        copying: StagingEvent,
        ring: StagingRing,
    ) -> None:
        self._blocks, self.block_ids, self._first, self._move = blocks, block_ids, first, move
        self._copying, self._ring = copying, ring
        self._ended = False
        self.num_moved = 0

    def run(self, most: int) -> None:
        """Pass whole blocks, of ``most`` bytes at a time if there are several: a half is used up to a multiple."""
        size = self._blocks.block_bytes
        in_half = max(1, min(self._ring.half_bytes, most) // size)
        lengths = [size] * len(self.block_ids)
        self._ring.run(lengths, in_half * size, self.copy, self.move, fills=self._copying is StagingEvent.FILL)

    def copy(self, event: StagingEvent, half: int, pieces: Sequence[Piece]) -> None:
        """Start the device's copies for ``pieces``, if any."""
        if event is not self._copying:
            return
        first = pieces[0].request_index
        if event is StagingEvent.FILL:
            count = 0 if self._ended else len(pieces)
        else:
            count = min(max(0, self.num_moved - first), len(pieces))
        if count:
            copier, staged = self._ring.copier, self._ring.rows(pieces[:count])
            block_ids = self.block_ids[first : first + count]
            if event is StagingEvent.FILL:
                copier.gather(half, staged, self._blocks, block_ids)
            else:
                copier.scatter(half, self._blocks, block_ids, staged)

    def move(self, pieces: Sequence[Piece]) -> None:
        """Move ``pieces`` between the ring and the outside, up to the first that did not move."""
        if self._ended:
            return
        first = self._first + pieces[0].request_index
        try:
            count = self._move(first, [self._ring.view(piece) for piece in pieces])
        except TanghuluError as error:
            if first == 0 or self._copying is not StagingEvent.DRAIN:
                raise
            _log.warning("a load of blocks ended at number %d: %s: %s", first, error.code, error.message)
            count = 0  # earlier blocks are whole
        self.num_moved += count
        self._ended = count < len(pieces)


def _num_leading(passages: Sequence[_Passage]) -> int:
    """Return the number of leading blocks moved by ``passages``, which follow each other."""
    total = 0
    for each in passages:
        total += each.num_moved
        if each.num_moved < len(each.block_ids):
            break
    return total
