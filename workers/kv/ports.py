"""Interfaces to the bytes of blocks: for transfers, which fill and drain them, and for other workers, which read them.

In main memory transfers use the cache in place, and peers read it there. Blocks on a device are transferred through
pinned memory (`kv.staging`); both parts of a worker that move KV (`connector`, `peer_server`) use only these
interfaces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tanghulu.transfer_engine.gpu.mover import Move
from tanghulu.workers.engine.kv_layout import KvMemory
from tanghulu.workers.kv.peer_methods import SharedCache

if TYPE_CHECKING:
    from tanghulu.workers.kv.device_sharing import DeviceSharing  # it imports torch


def wipe(buffers: Sequence[memoryview]) -> None:
    """Zero ``buffers``, which did not arrive whole.

    Their bytes may be NaN, which attention's masks do not hide: values in a block behind a sequence's last token are
    multiplied by zero, not left out.
    """
    for buffer in buffers:
        buffer[:] = bytes(len(buffer))


class BlockPort(Protocol):
    """Blocks as buffers of bytes; called from threads that may block, blocks belonging to the caller meanwhile."""

    def fill(self, block_ids: Sequence[int], move: Move, *, shareable: bool = False) -> int:
        """Let ``move`` write the blocks, as `BlockMover.fill` does; return the number of leading ones done."""

    def drain(self, block_ids: Sequence[int], move: Move, *, shareable: bool = False) -> int:
        """Let ``move`` read the blocks, as `BlockMover.drain` does; return the number of leading ones done."""


class ExportWindow(Protocol):
    """Blocks as ranges of the segment that other workers read.

    ``shared`` describes the cache if those of this host can also read it in place.
    """

    shared: SharedCache | None

    def take(self, block_ids: Sequence[int]) -> list[int]:
        """Return offsets for reading the leading ones of ``block_ids``, at least one; never blocks.

        Raises Overloaded when there is no room for any.
        """

    def show(self, block_ids: Sequence[int], offsets: Sequence[int]) -> list[memoryview]:
        """Bring the blocks to their ``offsets``; return their bytes. May block: not for an event loop."""

    def give_back(self, offset: int) -> None:
        """Note that no worker reads at ``offset`` any more; call it once for each `take` that returned it."""

    def leave(self, offsets: Sequence[int]) -> None:
        """Give back ``offsets`` from `take` that will be neither shown nor read."""


class KvPorts(NamedTuple):
    """The two ports of one cache: for this worker's own transfers, and for other workers' reads.

    With ``sharing`` blocks also come from other caches of this host without a port.
    """

    port: BlockPort
    window: ExportWindow
    sharing: DeviceSharing | None = None


class HostBlocks:
    """Port and window of a cache in main memory, which is the segment itself: nothing is copied."""

    shared: SharedCache | None = None

    def __init__(self, memory: KvMemory) -> None:
        self._memory = memory

    def fill(self, block_ids: Sequence[int], move: Move, *, shareable: bool = False) -> int:
        return move(0, self._views(block_ids))

    def drain(self, block_ids: Sequence[int], move: Move, *, shareable: bool = False) -> int:
        return move(0, self._views(block_ids))

    def take(self, block_ids: Sequence[int]) -> list[int]:
        return [self._memory.block_offset(block) for block in block_ids]

    def show(self, block_ids: Sequence[int], offsets: Sequence[int]) -> list[memoryview]:
        return self._views(block_ids)

    def give_back(self, offset: int) -> None:
        """Do nothing: the block stays where it is."""

    def leave(self, offsets: Sequence[int]) -> None:
        """Do nothing: the blocks stay where they are."""

    def _views(self, block_ids: Sequence[int]) -> list[memoryview]:
        return [self._memory.block_view(block) for block in block_ids]
