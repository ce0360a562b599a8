"""Jobs between vLLM's host memory and the store: each ends once, by its deadline, with its outcome.

vLLM's manager gives a job as keys and row numbers of its host memory; such a row holds a chunk of all ranks of this
host contiguously. The rows of a store are pinned until the job has ended, those of a load wait for it. Imports nothing
of vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tanghulu.engines.common.cache_tasks import Tasks
from tanghulu.engines.common.options import LevelOptions
from tanghulu.runtime.clock import Clock, SystemClock
from tanghulu.store.client.block_store import BlockStore
from tanghulu.types import ChunkKey


@dataclass(frozen=True, slots=True)
class EndedJob:
    """``good``: for each key of the job, whether its bytes have arrived."""

    job_id: int
    good: tuple[bool, ...]
    took_s: float = 0.0
    moved_bytes: int = 0


class TierJobs:
    """All jobs of an engine. ``memory``: its host memory, rows of ``row_bytes`` each.

    Methods are called by the engine's thread only.
    """

    def __init__(
        self,
        store: BlockStore,
        memory: memoryview,
        row_bytes: int,
        options: LevelOptions,
        clock: Clock | None = None,
    ) -> None:
        self._store, self._memory, self._row_bytes = store, memory, row_bytes
        self._clock = clock or SystemClock()
        # Requests wait for loads: stores, however many, have their own thread.
        self._loads: Tasks[EndedJob] = Tasks("load", options.threads, lambda: None)
        self._stores: Tasks[EndedJob] = Tasks("store", 1, lambda: None, options.max_pending_bytes)

    @property
    def num_shed(self) -> int:
        return self._stores.num_shed

    def load(self, job_id: int, keys: Sequence[ChunkKey], rows: Sequence[int]) -> None:
        """Start filling the rows; ``take_ended`` reports the end."""
        self._loads.begin(lambda: self._move(self._get, job_id, keys, rows), _failed(job_id, keys))

    def store(self, job_id: int, keys: Sequence[ChunkKey], rows: Sequence[int]) -> None:
        """Start putting the rows; refused as a whole while more than ``save_pending_bytes`` wait."""
        num_bytes = len(keys) * self._row_bytes
        self._stores.begin(lambda: self._move(self._store.save, job_id, keys, rows), _failed(job_id, keys), num_bytes)

    def take_ended(self) -> list[EndedJob]:
        """Return the jobs that ended since the last call."""
        return [*self._loads.take_all().values(), *self._stores.take_all().values()]

    def drain(self) -> None:
        """Return when no job accesses the memory any more; those that have not begun fail."""
        self._stores.drain()
        self._loads.drain()

    def close(self) -> None:
        """Cancel what is in progress, and return when it has ended."""
        self._store.close()
        self.drain()
        self._loads.close()
        self._stores.close()

    def _move(
        self,
        move: Callable[[Sequence[str], list[memoryview]], list[bool]],
        job_id: int,
        keys: Sequence[ChunkKey],
        rows: Sequence[int],
    ) -> EndedJob:
        began_s = self._clock.now_s()
        good = move(keys, [self._row(row) for row in rows])
        took_s = self._clock.now_s() - began_s
        return EndedJob(job_id, tuple(good), took_s, sum(good) * self._row_bytes)

    def _get(self, keys: Sequence[str], memory: list[memoryview]) -> list[bool]:
        return [error is None for error in self._store.load(keys, memory)]

    def _row(self, row: int) -> memoryview:
        return self._memory[row * self._row_bytes : (row + 1) * self._row_bytes]


def _failed(job_id: int, keys: Sequence[ChunkKey]) -> EndedJob:
    return EndedJob(job_id, (False,) * len(keys))
