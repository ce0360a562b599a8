"""Jobs between vLLM's host memory and the store: each ends once, by its deadline, with its outcome.

vLLM's manager gives a job as keys and row numbers of its host memory; such a row holds a chunk of all ranks of this
host contiguously. The rows of a store are pinned until the job has ended, those of a load wait for it. Imports nothing
of vLLM.

vLLM orders loads while a request waits, and pins the loaded rows only when it admits the request. Until then each
further load may evict them, even those of the same request, and vLLM loads evicted ones again: a request with more
stored chunks than there are rows would wait for ever. ``Promotions`` limits the loads of a waiting request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Final

from tanghulu.engines.common.cache_tasks import Tasks
from tanghulu.engines.common.options import LevelOptions
from tanghulu.store.client.block_store import BlockStore
from tanghulu.types import ChunkKey

#: Loads of one chunk for one waiting request: rows are also lost to others while the engine has no room for it.
MAX_LOADS: Final = 3


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

    def __init__(self, store: BlockStore, memory: memoryview, row_bytes: int, options: LevelOptions) -> None:
        self._store, self._memory, self._row_bytes = store, memory, row_bytes
        # Requests wait for loads: stores, however many, have their own thread.
        self._loads: Tasks[EndedJob] = Tasks("load", options.threads, lambda: None)
        self._stores: Tasks[EndedJob] = Tasks("store", 1, lambda: None, options.max_pending_bytes)

    @property
    def num_shed(self) -> int:
        return self._stores.num_shed

    def load(self, job_id: int, keys: Sequence[ChunkKey], rows: Sequence[int]) -> None:
        """Start filling the rows; ``take_ended`` reports the end, which is due within ``load_deadline_s``."""
        until_s = self._store.load_until_s()

        def get(keys: Sequence[str], memory: list[memoryview]) -> list[bool]:
            return [error is None for error in self._store.load(keys, memory, until_s)]

        self._loads.begin(lambda: self._move(get, job_id, keys, rows), _failed(job_id, keys))

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
        began_s = time.monotonic()
        good = move(keys, [self._row(row) for row in rows])
        took_s = time.monotonic() - began_s
        return EndedJob(job_id, tuple(good), took_s, sum(good) * self._row_bytes)

    def _row(self, row: int) -> memoryview:
        return self._memory[row * self._row_bytes : (row + 1) * self._row_bytes]


def _failed(job_id: int, keys: Sequence[ChunkKey]) -> EndedJob:
    return EndedJob(job_id, (False,) * len(keys))


class Promotions:
    """The chunks offered to waiting requests, of which vLLM loads those that it finds room for, in the same step.

    A request is offered as many chunks as there are rows, none again that found no room, and one evicted before its
    admission until it was loaded ``MAX_LOADS`` times; the others are computed. Example with 4 rows and 10 stored
    chunks: 0 to 3 are offered and loaded, 4 is missing, and vLLM admits the request with 4 chunks. With 10 offers vLLM
    would load 4 to 7 in place of 0 to 3, then 0 to 3 in place of 4 to 7, and so on.
    """

    def __init__(self, num_rows: int) -> None:
        assert num_rows > 0
        self._num_rows = num_rows
        self._num_loads: dict[str, dict[Hashable, int]] = {}  # of each chunk offered, by request
        self._offered: set[tuple[str, Hashable]] = set()  # in this step, and not yet loaded

    def __len__(self) -> int:
        return len(self._num_loads)

    def begin(self, request_id: str) -> None:
        """Note a new request."""
        self._num_loads[request_id] = {}

    def end(self, request_id: str) -> None:
        """Forget a request."""
        self._num_loads.pop(request_id, None)

    def allows(self, request_id: str, key: Hashable) -> bool:
        """Return whether to offer a chunk to the request."""
        chunks = self._num_loads.get(request_id, {})
        return chunks[key] < MAX_LOADS if key in chunks else len(chunks) < self._num_rows

    def offer(self, request_id: str, key: Hashable) -> None:
        """Note the offer of a chunk, which lasts until the end of the step."""
        if request_id in self._num_loads:
            self._num_loads[request_id].setdefault(key, 0)
            self._offered.add((request_id, key))

    def load(self, request_id: str, keys: Collection[Hashable]) -> None:
        """Note a load of chunks offered in this step."""
        self._offered -= {(request_id, key) for key in keys}
        chunks = self._num_loads.get(request_id, {})
        chunks |= {key: chunks.get(key, 0) + 1 for key in keys}

    def end_step(self, anew: Collection[str]) -> None:
        """Note the end of a step; the requests ``anew`` were admitted or preempted by it, and start from nothing."""
        for request_id, key in self._offered:
            if request_id in self._num_loads:
                self._num_loads[request_id][key] = MAX_LOADS
        self._offered.clear()
        for request_id in self._num_loads.keys() & anew:
            self._num_loads[request_id] = {}

    def check(self) -> None:
        for chunks in self._num_loads.values():
            assert len(chunks) <= self._num_rows
            assert all(0 <= number <= MAX_LOADS for number in chunks.values())
