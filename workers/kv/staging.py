"""Transfers of a device's blocks through pinned memory: the device's side of `kv.ports`.

`DeviceStaging` divides ``--kv-staging``. One half is the segment from which other workers read handed-over KV, cut into
slots of a block. The other half is rings, one for each thread that moves KV: fetches, writes to the store, and the
engine's own copies of preempted blocks; and for helpers that share in the store's loads and saves.

The two are kept apart. This worker's fetches and writes pass through rings of the transfer engine
(`transfer_engine.gpu.mover`), in which the device copies one half while the other is being moved. Blocks for other
workers lie in the segment offered to them, cut into slots of a block each, for as long as they hold leases on it. A
slot is free again when its copy has ended and its reader has gone, whichever comes last.

No copy waits for the device's computation: a step has been computed before its blocks are committed, and a block is
given to a transfer only when no step uses it (`compute.runners`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from tanghulu.errors import ConfigError, Overloaded
from tanghulu.transfer_engine.gpu.mover import BlockMover
from tanghulu.transfer_engine.gpu.staging import DeviceBlocks, DeviceCopier, StagingRing, make_copier, pin
from tanghulu.types import format_size
from tanghulu.workers.compute.device import wait_for
from tanghulu.workers.compute.kv_cache import DeviceKvCache
from tanghulu.workers.engine.engine import ModelRunner
from tanghulu.workers.engine.kv_layout import KvLayout
from tanghulu.workers.kv.connector import NUM_FETCH_THREADS
from tanghulu.workers.kv.device_sharing import make_sharing
from tanghulu.workers.kv.peer_methods import SharedCache
from tanghulu.workers.kv.ports import KvPorts
from tanghulu.workers.ranks.processes import RankProcesses

#: A ring for each thread that moves KV: the fetchers, the writer, and the engine's, which never waits.
NUM_RINGS = NUM_FETCH_THREADS + 2
#: A ring has two halves of at least a block.
_MIN_BLOCKS = 2 * 2 * NUM_RINGS
#: Further threads with rings that share in loads and saves of the store, as far as ``--kv-staging`` has room for rings.
NUM_HELPERS = 4


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

    def __init__(
        self, blocks: DeviceBlocks, segment: memoryview, copier: DeviceCopier, shared: SharedCache | None = None
    ) -> None:
        self.shared = shared
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
                self._copier.gather(0, self._staged[offset : offset + size][None], self._blocks, [block])
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
                f"{format_size(layout.block_bytes)}; it must be at least {format_size(least)}"
            )
        self._device = device
        self._num_helpers = min(NUM_HELPERS, staging_bytes // 2 // (2 * layout.block_bytes) - NUM_RINGS)
        self._ring_bytes = staging_bytes // 2 // (NUM_RINGS + self._num_helpers)
        self._mover: BlockMover | None = None
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
        copiers = [make_copier(*blocks.devices, settled=True) for _ in range(NUM_RINGS + self._num_helpers + 1)]
        rings = [StagingRing(self._device, self._ring_bytes, copier) for copier in copiers[1:]]
        self._mover = BlockMover(blocks, rings[:NUM_RINGS], rings[NUM_RINGS:])
        sharing = make_sharing(blocks)
        shared = None if sharing is None else sharing.own
        return KvPorts(self._mover, StagedWindow(blocks, segment, copiers[0], shared), sharing)

    def close(self) -> None:
        """End the mover's threads and unpin; call it before the segment is closed."""
        if self._mover is not None:
            self._mover.close()
            self._mover = None
        if self._unpin is not None:
            torch.cuda.synchronize(self._device)  # a copy for a departed reader may still be under way
            self._unpin()
            self._unpin = None
