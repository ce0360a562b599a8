"""Performs the decisions: lookups of the scheduler, loads and saves of one rank in threads.

Nothing here raises into the engine, and every started load and save ends: successfully, at its deadline, or without
any bytes.

An engine on a GPU queues its computation and goes on, so a block may be unwritten, or still in use, when its transfer
starts. Each transfer therefore comes with a `Wait` for the computation queued before it (`BlockMemory.mark`).
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tanghulu.engines.common.cache_tasks import Tasks
from tanghulu.engines.common.options import ConnectorOptions
from tanghulu.engines.common.requests import Block, LoadJob, SaveJob
from tanghulu.errors import TanghuluError
from tanghulu.runtime.clock import Clock, SystemClock
from tanghulu.store.client.block_store import BlockStore
from tanghulu.types import ChunkKey

#: Seconds for which an answer is reused: chunks come and go meanwhile, and a load detects that.
ANSWER_S = 1.0
NUM_SAVE_THREADS = 1


#: Waits until computation that was queued earlier has ended. Called in a thread of the transfers, or in several.
Wait = Callable[[], None]


class BlockMemory(ABC):
    """One rank's part of the engine's cache; ``keys(hashes)`` are the names of blocks in the store.

    `mark` is called by the engine's thread, `load` and `save` by those of the transfers.
    """

    def __init__(self, keys: Callable[[Sequence[bytes]], list[ChunkKey]]) -> None:
        self._keys = keys

    @abstractmethod
    def mark(self) -> Wait:
        """Return the wait for all computation that the engine has queued by now."""

    @abstractmethod
    def load(self, store: BlockStore, blocks: Sequence[Block], until_s: float, wait: Wait) -> int:
        """Fill blocks that computation may use until ``wait`` returns.

        Returns the number of leading ones that have their bytes; nothing writes to the blocks any more.
        """

    @abstractmethod
    def save(self, store: BlockStore, blocks: Sequence[Block], wait: Wait) -> None:
        """Write blocks that have their contents when ``wait`` returns to the store; nothing reads them afterwards."""

    @abstractmethod
    def close(self) -> None:
        """End threads of its own, once their calls of the store have ended."""

    def keys_of(self, blocks: Sequence[Block]) -> list[ChunkKey]:
        """Return the key of each block."""
        return self._keys([each.block_hash for each in blocks])


class HostMemory(BlockMemory):
    """Blocks in main memory, computed by the thread that starts their transfers: the store reads and fills them there.

    ``buffers(block_id)`` is a block's memory, one buffer per layer.
    """

    def __init__(self, keys: Callable[[Sequence[bytes]], list[ChunkKey]], buffers: Callable[[int], list[Any]]) -> None:
        super().__init__(keys)
        self._buffers = buffers

    def mark(self) -> Wait:
        return lambda: None

    def load(self, store: BlockStore, blocks: Sequence[Block], until_s: float, wait: Wait) -> int:
        return num_leading(store.load(self.keys_of(blocks), self._of(blocks), until_s))

    def save(self, store: BlockStore, blocks: Sequence[Block], wait: Wait) -> None:
        store.save(self.keys_of(blocks), self._of(blocks))

    def close(self) -> None:
        pass

    def _of(self, blocks: Sequence[Block]) -> list[list[Any]]:
        return [self._buffers(each.block_id) for each in blocks]


def num_leading(errors: Sequence[TanghuluError | None]) -> int:
    """Return the number of blocks before the first with an error."""
    return next((at for at, error in enumerate(errors) if error is not None), len(errors))


@dataclass
class Ended:
    """Transfers that ended since the last call."""

    loaded: set[str] = field(default_factory=set)  # requests, including those that lost blocks
    bad_block_ids: set[int] = field(default_factory=set)
    saved: Counter[int] = field(default_factory=Counter)  # jobs, including failed ones


class _Answer(NamedTuple):
    num_stored: int
    num_keys: int
    until_s: float


class PrefixLookup:
    """Counts the leading blocks of a request in the store; 0 if it does not answer within the deadline.

    An engine's scheduler asks again at every attempt to schedule a waiting request, so answers are cached briefly.
    """

    def __init__(self, store: BlockStore, deadline_s: float, clock: Clock | None = None) -> None:
        self._store, self._deadline_s, self._clock = store, deadline_s, clock or SystemClock()
        self._answers: dict[str, _Answer] = {}

    def __len__(self) -> int:
        return len(self._answers)

    def num_stored(self, request_id: str, keys: Sequence[ChunkKey]) -> int:
        """Return the count, from the store or from an answer that is still fresh."""
        now_s, answer = self._clock.now_s(), self._answers.get(request_id)
        if answer is not None and answer.num_keys == len(keys) and now_s < answer.until_s:
            return answer.num_stored
        found = self._store.num_leading(keys, self._deadline_s)
        if found is None:
            return 0
        self._answers[request_id] = _Answer(found, len(keys), now_s + ANSWER_S)
        return found

    def forget(self, request_id: str) -> None:
        """Drop the answer for a request that loads, computes or has ended."""
        self._answers.pop(request_id, None)


class Transfers:
    """The loads and saves of one rank. Methods are called by the engine's thread only."""

    def __init__(
        self, store: BlockStore, memory: BlockMemory, options: ConnectorOptions, clock: Clock | None = None
    ) -> None:
        self._store, self._memory, self._options, self._clock = store, memory, options, clock or SystemClock()
        self._some_ended = threading.Event()
        # Requests wait for loads: saves, however many, have their own thread.
        self._loads: Tasks[tuple[LoadJob, int, float]] = Tasks("load", options.threads, self._some_ended.set)
        self._saves: Tasks[tuple[SaveJob, float]] = Tasks("save", NUM_SAVE_THREADS, self._some_ended.set)
        self._num_under_way = 0
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def load(self, job: LoadJob, wait: Wait) -> None:
        """Start a load into blocks that computation may use until ``wait`` returns; `take_ended` reports its end."""
        until_s = self._clock.now_s() + self._options.load_deadline_s
        self._num_under_way += 1
        self._loads.begin(lambda: self._load(job, until_s, wait), (job, 0, 0.0))

    def save(self, job: SaveJob, wait: Wait) -> None:
        """Start a save of blocks that have their contents when ``wait`` returns; `take_ended` reports its end.

        The blocks must keep their contents until then.
        """
        self._num_under_way += 1
        self._saves.begin(lambda: self._save(job, wait), (job, 0.0))

    def take_ended(self, wait_s: float = 0.0) -> Ended:
        """Return what ended since the last call; if nothing has, wait at most ``wait_s`` for the first end."""
        if self._num_under_way and wait_s:
            self._some_ended.wait(wait_s)
        self._some_ended.clear()
        ended = Ended()
        for job, num_good, took_s in self._loads.take_all().values():
            self._num_under_way -= 1
            self.seconds["load_s"] += took_s
            ended.loaded.add(job.request_id)
            ended.bad_block_ids.update(block.block_id for block in job.blocks[num_good:])
        for save, took_s in self._saves.take_all().values():
            self._num_under_way -= 1
            self.seconds["save_s"] += took_s
            ended.saved[save.job_id] += 1
        return ended

    def close(self) -> None:
        """Start nothing more, and return at once: transfers in progress end at their deadlines."""
        self._loads.close(wait=False)
        self._saves.close(wait=False)

    def _load(self, job: LoadJob, until_s: float, wait: Wait) -> tuple[LoadJob, int, float]:
        """Fill the blocks; returns the number of leading ones that have their bytes, and the seconds taken."""
        began_s = self._clock.now_s()
        num_good = self._memory.load(self._store, job.blocks, until_s, wait)
        return job, num_good, self._clock.now_s() - began_s

    def _save(self, job: SaveJob, wait: Wait) -> tuple[SaveJob, float]:
        began_s = self._clock.now_s()
        self._memory.save(self._store, job.blocks, wait)
        return job, self._clock.now_s() - began_s
