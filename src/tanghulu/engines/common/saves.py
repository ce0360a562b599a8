"""Unfinished saves: the blocks pinned for them, and the bound on their bytes. Pure.

Every rank of an engine writes its part of a save and acknowledges its end, successful or not. The engine must not give
a pinned block to another request before all ranks have. So a job pins its blocks when ordered, and its last
acknowledgement releases them. Example with two ranks: job 7 pins blocks 3 and 4; the first acknowledgement releases
nothing, the second 3 and 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Block(NamedTuple):
    """A block of an engine's cache: its name and its index."""

    block_hash: bytes
    block_id: int


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Blocks to write to the store."""

    job_id: int
    blocks: tuple[Block, ...]


@dataclass(slots=True)
class _Pending:
    block_ids: list[int]
    num_awaited: int


class PendingSaves:
    """The jobs not yet acknowledged by all ranks. Blocks beyond ``max_bytes`` are not saved, but counted."""

    def __init__(self, num_ranks: int, block_bytes: int, max_bytes: int) -> None:
        assert num_ranks > 0
        assert block_bytes > 0
        self._num_ranks, self._block_bytes = num_ranks, block_bytes
        self._max_blocks = max_bytes // block_bytes
        self._pending: dict[int, _Pending] = {}
        self._next_id = 0
        self._num_pinned = 0
        self.num_skipped = 0

    @property
    def num_pinned(self) -> int:
        return self._num_pinned

    def __bool__(self) -> bool:
        return bool(self._pending)

    def order(self, blocks: Sequence[Block]) -> SaveJob | None:
        """Return a job for as many leading ``blocks`` as there is room for; the caller pins the blocks of the job.

        A prefix without its beginning is useless, so the last blocks are left out.
        """
        taken = tuple(blocks[: max(0, self._max_blocks - self._num_pinned)])
        self.num_skipped += len(blocks) - len(taken)
        if not taken:
            return None
        job = SaveJob(self._next_id, taken)
        self._next_id += 1
        self._pending[job.job_id] = _Pending([block.block_id for block in taken], self._num_ranks)
        self._num_pinned += len(taken)
        return job

    def acknowledge(self, job_id: int, num_ranks: int = 1) -> list[int]:
        """Note that ``num_ranks`` more ranks ended the job; returns the unpinned blocks, none before the last rank."""
        pending = self._pending[job_id]
        pending.num_awaited -= num_ranks
        assert pending.num_awaited >= 0, f"job {job_id} was acknowledged by more ranks than there are"
        if pending.num_awaited:
            return []
        del self._pending[job_id]
        self._num_pinned -= len(pending.block_ids)
        return pending.block_ids

    def check(self) -> None:
        assert self._num_pinned == sum(len(each.block_ids) for each in self._pending.values())
        assert self._num_pinned <= max(0, self._max_blocks)
        assert all(0 < each.num_awaited <= self._num_ranks for each in self._pending.values())
