"""How much pinned memory a worker with a GPU takes, and what for: the ways in and out of its cache (`kv_port`).

One half of ``--kv-staging`` is the segment that other workers read handed-over KV from, cut into slots of a block. The
other half is rings, one for each thread that moves KV: fetches, writes to the store, and the engine's own copies of
what it preempts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tanghulu.errors import ConfigError
from tanghulu.transfer_engine.gpu.staging import StagingRing, make_copier, pin
from tanghulu.types import format_size
from tanghulu.workers.compute.kv_cache import DeviceKvCache
from tanghulu.workers.engine.engine import ModelRunner
from tanghulu.workers.engine.kv_layout import KvLayout
from tanghulu.workers.kv.connector import NUM_FETCH_THREADS
from tanghulu.workers.kv.ports import KvDoor
from tanghulu.workers.kv.staging import DeviceBlocks, StagedPort, StagedWindow
from tanghulu.workers.ranks.processes import RankProcesses

#: Who passes KV through a ring: threads that fetch, the one that writes, and the engine's, which never waits for one.
NUM_RINGS = NUM_FETCH_THREADS + 2
#: A ring has two halves of at least a block.
_MIN_BLOCKS = 2 * 2 * NUM_RINGS


class DeviceStaging:
    """`assembly.Staging` for a cache on ``device``; raises ConfigError if ``staging_bytes`` are too few."""

    def __init__(self, layout: KvLayout, device: torch.device, staging_bytes: int) -> None:
        least = _MIN_BLOCKS * layout.block_bytes
        if staging_bytes < least:
            raise ConfigError(
                f"--kv-staging {format_size(staging_bytes)} is too little for blocks of "
                f"{format_size(layout.block_bytes)}: {NUM_RINGS} rings and what others read take {format_size(least)}"
            )
        self._device = device
        self._ring_bytes = staging_bytes // 2 // NUM_RINGS
        self._unpin: Callable[[], None] | None = None
        self.segment_bytes = staging_bytes // 2 // layout.block_bytes * layout.block_bytes

    def open(self, runner: ModelRunner, ranks: RankProcesses | None, segment: memoryview) -> KvDoor:
        """Pin ``segment`` and the rings; raises NodeUnavailable if the driver refuses."""
        cache = runner.cache
        assert isinstance(cache, DeviceKvCache)
        others = [] if ranks is None else ranks.open_caches(cache.num_blocks)
        blocks = DeviceBlocks([cache.memory, *others])
        if self._device.type == "cuda":
            self._unpin = pin(segment)
        copiers = [make_copier(self._device, settled=True) for _ in range(NUM_RINGS + 1)]
        rings = [StagingRing(self._device, self._ring_bytes, copier) for copier in copiers[1:]]
        return KvDoor(StagedPort(blocks, rings), StagedWindow(blocks, segment, copiers[0]))

    def close(self) -> None:
        """Unpin the segment."""
        if self._unpin is not None:
            torch.cuda.synchronize(self._device)  # a copy for a reader that is gone may still be under way
            self._unpin()
            self._unpin = None
