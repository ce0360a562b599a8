"""Transfers of a device's blocks through pinned memory: the device's side of `kv.ports`.

`DeviceStaging` divides ``--kv-staging``. One half is the segment from which other workers read handed-over KV, cut into
slots of a block. The other half is rings, one for each thread that moves KV: fetches, writes to the store, and the
engine's own copies of preempted blocks.

The two are kept apart. This worker's fetches and writes pass through rings of the transfer engine
(`transfer_engine.gpu.staging`), in which the device copies one half while the other is being moved. Blocks for other
workers lie in the segment offered to them, cut into slots of a block each, for as long as they hold leases on it. A
slot is free again when its copy has ended and its reader has gone, whichever comes last.

No copy waits for the device's computation: a step has been computed before its blocks are committed, and a block is
given to a transfer only when no step uses it (`compute.runners`).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import structlog
import torch

from tanghulu.errors import ConfigError, Overloaded, TanghuluError
from tanghulu.transfer_engine.gpu.staging import DeviceCopier, StagingRing, make_copier, pin
from tanghulu.transfer_engine.gpu.staging_plan import Piece, StagingEvent
from tanghulu.types import format_size
from tanghulu.workers.compute.device import wait_for
from tanghulu.workers.compute.kv_cache import DeviceKvCache
from tanghulu.workers.engine.engine import ModelRunner
from tanghulu.workers.engine.kv_layout import KvLayout
from tanghulu.workers.kv.connector import NUM_FETCH_THREADS
from tanghulu.workers.kv.ports import KvPorts, Move
from tanghulu.workers.ranks.processes import RankProcesses

_log = structlog.get_logger(__name__)

#: A ring for each thread that moves KV: the fetchers, the writer, and the engine's, which never waits.
NUM_RINGS = NUM_FETCH_THREADS + 2
#: A ring has two halves of at least a block.
_MIN_BLOCKS = 2 * 2 * NUM_RINGS


class DeviceBlocks:
    """A cache's blocks as parts on devices: ``parts[p]`` uint8 [blocks, part bytes], side by side in a block."""

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        self._parts = parts
        self.block_bytes = sum(part.shape[1] for part in parts)
        self.devices = list(dict.fromkeys(part.device for part in parts))

    def pairs(self, block_id: int, staged: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each part of the block, and its place in ``staged``, which holds a block's bytes."""
        at = 0
        for part in self._parts:
            size = part.shape[1]
            yield part[block_id], staged[at : at + size]
            at += size


class StagedPort:
    """A `BlockPort` over ``blocks``. Each of ``rings`` serves one caller at a time; others wait for the next free."""

    def __init__(self, blocks: DeviceBlocks, rings: Sequence[StagingRing]) -> None:
        self._blocks = blocks
        self._free: queue.SimpleQueue[StagingRing] = queue.SimpleQueue()
        for ring in rings:
            assert ring.half_bytes >= blocks.block_bytes, "a half holds at least a block"
            self._free.put(ring)

    def fill(self, block_ids: Sequence[int], move: Move) -> int:
        """Let ``move`` write as many blocks at a time as half a ring holds; copy the written ones to the device."""
        return self._pass(block_ids, move, StagingEvent.DRAIN)

    def drain(self, block_ids: Sequence[int], move: Move) -> int:
        """Copy as many blocks at a time as half a ring holds from the device, and let ``move`` read them."""
        return self._pass(block_ids, move, StagingEvent.FILL)

    def _pass(self, block_ids: Sequence[int], move: Move, copying: StagingEvent) -> int:
        """Pass blocks through a ring, with device copies out of it (DRAIN) or into it (FILL): see ``copying``."""
        if not block_ids:
            return 0
        with self._ring() as ring:
            passage = _Passage(self._blocks, block_ids, move, copying, ring)
            # Whole blocks: a half is used up to a multiple of them.
            whole = ring.half_bytes // self._blocks.block_bytes * self._blocks.block_bytes
            lengths = [self._blocks.block_bytes] * len(block_ids)
            ring.run(lengths, whole, passage.copies, passage.move, fills=copying is StagingEvent.FILL)
            return passage.num_moved

    @contextmanager
    def _ring(self) -> Iterator[StagingRing]:
        ring = self._free.get()
        try:
            yield ring
        finally:
            self._free.put(ring)


class _Passage:
    """The blocks of one call, passing through a ring; ``num_moved`` leading ones have moved, none after a failure.

    A failure to fill ends it with the blocks before it, if there is at least one, or else is raised.
    """

    def __init__(
        self, blocks: DeviceBlocks, block_ids: Sequence[int], move: Move, copying: StagingEvent, ring: StagingRing
    ) -> None:
        self._blocks, self._block_ids, self._move = blocks, block_ids, move
        self._copying, self._ring = copying, ring
        self._ended = False
        self.num_moved = 0

    def copies(self, event: StagingEvent, piece: Piece) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the (target, source) pairs of the device's copies for ``piece``."""
        index = piece.request_index
        unwanted = self._ended if event is StagingEvent.FILL else index >= self.num_moved
        if event is not self._copying or unwanted:
            return
        for there, staged in self._blocks.pairs(self._block_ids[index], self._ring.staged(piece)):
            yield (there, staged) if event is StagingEvent.DRAIN else (staged, there)

    def move(self, pieces: Sequence[Piece]) -> None:
        """Move ``pieces`` between the ring and the outside, up to the first that did not move."""
        if self._ended:
            return
        first = pieces[0].request_index
        try:
            count = self._move(first, [self._ring.view(piece) for piece in pieces])
        except TanghuluError as error:
            if self.num_moved == 0 or self._copying is not StagingEvent.DRAIN:
                raise
            _log.warning("fill.ended_early", num_blocks=self.num_moved, code=error.code, error=error.message)
            count = 0  # earlier blocks are whole
        self.num_moved += count
        self._ended = count < len(pieces)


class SlotTable:
    """Slots of the segment. One is free unless a copy into it is under way or a reader wants it. Pure."""

    def __init__(self, num_slots: int) -> None:
        assert num_slots > 0
        self.num_slots = num_slots
        self._filling: set[int] = set()
        self._wanted: set[int] = set()
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Take up to ``count`` free slots; for each, `arrived` and `give_back` must follow, in any order."""
        taken = [self._free.pop() for _ in range(min(count, len(self._free)))]
        self._filling.update(taken)
        self._wanted.update(taken)
        return taken

    def arrived(self, slot: int) -> None:
        """Note that the copy into the slot has ended."""
        self._filling.remove(slot)
        if slot not in self._wanted:
            self._free.append(slot)

    def give_back(self, slot: int) -> None:
        """Note that no reader wants the slot any more."""
        self._wanted.remove(slot)
        if slot not in self._filling:
            self._free.append(slot)

    def check(self) -> None:
        assert sorted([*self._free, *(self._filling | self._wanted)]) == list(range(self.num_slots))


class StagedWindow:
    """An `ExportWindow` over ``segment``, which is pinned if the blocks are on a GPU.

    The event loop takes and gives back, its threads show.
    """

    def __init__(self, blocks: DeviceBlocks, segment: memoryview, copier: DeviceCopier) -> None:
        self._blocks = blocks
        self._copier = copier
        self._segment = segment
        self._staged = torch.frombuffer(segment, dtype=torch.uint8)
        self._lock = threading.Lock()
        self.slots = SlotTable(len(segment) // blocks.block_bytes)

    def take(self, block_ids: Sequence[int]) -> list[int]:
        """Take slots for as many blocks as there is room for; raises Overloaded if there is none.

        Takes no more than half of the free ones, so that the next reader finds some too: a reader comes again for more.
        """
        with self._lock:
            share = -(-self.slots.num_free // 2)
            slots = self.slots.take(min(len(block_ids), share))
        if not slots:
            raise Overloaded(
                f"all {self.slots.num_slots} blocks of pinned memory are being read by other workers; "
                "compute the prompt, retry later, or raise --kv-staging"
            )
        return [slot * self._blocks.block_bytes for slot in slots]

    def show(self, block_ids: Sequence[int], offsets: Sequence[int]) -> list[memoryview]:
        """Copy the blocks to their slots and wait for that."""
        size = self._blocks.block_bytes
        try:
            for block, offset in zip(block_ids, offsets, strict=True):
                for there, staged in self._blocks.pairs(block, self._staged[offset : offset + size]):
                    self._copier.copy(0, staged, there)
        finally:
            self._copier.wait(0)
            self._each(offsets, self.slots.arrived)
        return [self._segment[offset : offset + size] for offset in offsets]

    def give_back(self, offset: int) -> None:
        """Free the slot, as soon as no copy into it is under way."""
        self._each([offset], self.slots.give_back)

    def leave(self, offsets: Sequence[int]) -> None:
        """Free slots taken that will not be shown."""
        self._each(offsets, self.slots.give_back)
        self._each(offsets, self.slots.arrived)

    def _each(self, offsets: Sequence[int], event: Callable[[int], None]) -> None:
        with self._lock:
            for offset in offsets:
                event(offset // self._blocks.block_bytes)


class DeviceStaging:
    """Pinned memory through which the blocks of a cache on ``device`` go to and from the outside.

    Raises ConfigError if ``staging_bytes`` are too few. Other workers read a segment of ``segment_bytes``.
    """

    def __init__(self, layout: KvLayout, device: torch.device, staging_bytes: int) -> None:
        least = _MIN_BLOCKS * layout.block_bytes
        if staging_bytes < least:
            raise ConfigError(
                f"--kv-staging {format_size(staging_bytes)} is too small for blocks of "
                f"{format_size(layout.block_bytes)}: {NUM_RINGS} rings and exports need {format_size(least)}"
            )
        self._device = device
        self._ring_bytes = staging_bytes // 2 // NUM_RINGS
        self._unpin: Callable[[], None] | None = None
        self.segment_bytes = staging_bytes // 2 // layout.block_bytes * layout.block_bytes

    def open(self, runner: ModelRunner, ranks: RankProcesses | None, segment: memoryview) -> KvPorts:
        """Make the ports of the runner's cache and the ranks'; other workers read ``segment``.

        Pins it and the rings; raises NodeUnavailable if the driver refuses.
        """
        cache = runner.cache
        assert isinstance(cache, DeviceKvCache)
        others = [] if ranks is None else ranks.open_caches(cache.num_blocks)
        blocks = DeviceBlocks([cache.memory, *others])
        wait_for(self._device)  # the cache is zeroed by now: no copier waits for that
        if self._device.type == "cuda":
            self._unpin = pin(segment)
        copiers = [make_copier(*blocks.devices, settled=True) for _ in range(NUM_RINGS + 1)]
        rings = [StagingRing(self._device, self._ring_bytes, copier) for copier in copiers[1:]]
        return KvPorts(StagedPort(blocks, rings), StagedWindow(blocks, segment, copiers[0]))

    def close(self) -> None:
        """Unpin; call it before the segment is closed."""
        if self._unpin is not None:
            torch.cuda.synchronize(self._device)  # a copy for a departed reader may still be under way
            self._unpin()
            self._unpin = None
