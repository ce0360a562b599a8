"""Performs what the decisions say: questions to the store from the scheduler, loads and saves of one rank in threads.

Nothing here raises into the engine, and every load and every save that is begun ends: in time, at its deadline, or with
the bytes of none. A store that does not answer is left alone for a while (``Breaker``).
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from tanghulu.engines.common.lookup import Answers, Breaker, SharedBreaker
from tanghulu.engines.common.options import ConnectorOptions
from tanghulu.engines.common.requests import LoadJob
from tanghulu.engines.common.saves import SaveJob
from tanghulu.errors import TanghuluError
from tanghulu.runtime.clock import Clock, SystemClock
from tanghulu.types import ChunkKey

_log = logging.getLogger(__name__)

#: Questions that fail in a row before the store is left alone; of transfers one is enough, it took a whole deadline.
MAX_FAILED_QUESTIONS = 3
MAX_FAILED_TRANSFERS = 1


class StoreClient(Protocol):
    """The part of ``KvClient`` that is used."""

    def match_prefix(self, keys: Sequence[str], *, deadline_s: float | None = None) -> int: ...

    def get_many_into(
        self, keys: Sequence[str], buffers: Sequence[Any], *, deadline_s: float | None = None
    ) -> Sequence[int | TanghuluError]: ...

    def put_many(self, items: Any, *, deadline_s: float | None = None) -> Sequence[Any]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class BlockMemory:
    """One rank's part of the engine's cache: ``keys(hashes)``, and a block's memory, one buffer a layer."""

    block_bytes: int
    keys: Callable[[Sequence[bytes]], list[ChunkKey]]
    buffers: Callable[[int], list[Any]]


@dataclass
class Ended:
    """What ended since it was asked last."""

    loaded: set[str] = field(default_factory=set)  # requests, also those that lost blocks
    bad_block_ids: set[int] = field(default_factory=set)
    saved: Counter[int] = field(default_factory=Counter)  # jobs, also those that failed


class PrefixLookup:
    """Asks how many leading blocks of a request the store has; 0 where it does not answer within the deadline."""

    def __init__(self, client: StoreClient, deadline_s: float, clock: Clock | None = None) -> None:
        self._client, self._deadline_s, self._clock = client, deadline_s, clock or SystemClock()
        self._breaker, self.answers = Breaker(MAX_FAILED_QUESTIONS), Answers()
        self.counts: Counter[str] = Counter()

    def num_stored(self, request_id: str, keys: Sequence[ChunkKey]) -> int:
        """The count, from the store or from an answer that is still fresh."""
        now_s = self._clock.now_s()
        known = self.answers.get(request_id, len(keys), now_s)
        if known is not None:
            return known
        if not keys or not self._breaker.allows(now_s):
            return 0
        self.counts["lookups"] += 1
        try:
            found = self._client.match_prefix(keys, deadline_s=self._deadline_s)
        except TanghuluError as error:
            self.counts["lookups_failed"] += 1
            was_open = self._breaker.is_open
            self._breaker.failed(self._clock.now_s())
            if self._breaker.is_open and not was_open:
                _log.warning("tanghulu: the store does not answer, prompts are computed meanwhile: %s", error)
            return 0
        self._breaker.succeeded()
        self.answers.put(request_id, len(keys), found, now_s)
        return found


class Transfers:
    """The loads and saves of one rank. Methods are called by the engine's thread alone."""

    def __init__(
        self, client: StoreClient, memory: BlockMemory, options: ConnectorOptions, clock: Clock | None = None
    ) -> None:
        self._client, self._memory, self._options, self._clock = client, memory, options, clock or SystemClock()
        self._breaker, self._lock = SharedBreaker(MAX_FAILED_TRANSFERS, self._clock), threading.Lock()
        # Loads are what requests wait for: saves, however many, have a thread of their own.
        self._loading = ThreadPoolExecutor(options.threads, "tanghulu-load")
        self._saving = ThreadPoolExecutor(1, "tanghulu-save")
        self._ended: SimpleQueue[tuple[LoadJob, int] | SaveJob] = SimpleQueue()
        self._num_under_way = 0
        self.counts: defaultdict[str, float] = defaultdict(float)

    def load(self, job: LoadJob) -> None:
        """Begin a load; ``take_ended`` will tell of it."""
        deadline_s = self._clock.now_s() + self._options.load_deadline_s
        self._submit(self._loading, lambda: self._load(job, deadline_s), (job, 0))

    def save(self, job: SaveJob) -> None:
        """Begin a save; ``take_ended`` will tell of it. The blocks must keep their contents until then."""
        self._submit(self._saving, lambda: self._save(job), job)

    def take_ended(self, wait_s: float = 0.0) -> Ended:
        """What ended since the last call; where nothing has, ``wait_s`` is the longest wait for the first end."""
        ended = Ended()
        while self._num_under_way:
            try:
                each = self._ended.get(timeout=wait_s)
            except Empty:
                break
            wait_s = 0.0
            self._num_under_way -= 1
            if isinstance(each, SaveJob):
                ended.saved[each.job_id] += 1
                continue
            job, num_good = each
            ended.loaded.add(job.request_id)
            ended.bad_block_ids.update(block.block_id for block in job.blocks[num_good:])
        return ended

    def close(self) -> None:
        """Begin nothing more, and wait for nothing: what is under way ends at its deadline."""
        for pool in (self._loading, self._saving):
            pool.shutdown(wait=False, cancel_futures=True)

    def _submit(self, pool: ThreadPoolExecutor, work: Callable[[], None], lost: tuple[LoadJob, int] | SaveJob) -> None:
        """Run ``work``, which tells its own end; where it cannot begin any more ``lost`` is told."""

        self._num_under_way += 1

        def done(future: Future[None]) -> None:
            if future.cancelled():
                self._ended.put(lost)
            elif (error := future.exception()) is not None:
                _log.error("tanghulu: a transfer broke off", exc_info=error)
                self._breaker.failed()

        try:
            pool.submit(work).add_done_callback(done)
        except RuntimeError:  # closed
            self._ended.put(lost)

    def _load(self, job: LoadJob, deadline_s: float) -> None:
        num_good = 0
        try:
            num_good = self._read(job, deadline_s)
        finally:
            self._ended.put((job, num_good))

    def _read(self, job: LoadJob, deadline_s: float) -> int:
        """How many leading blocks now have their bytes."""
        memory, began_s = self._memory, self._clock.now_s()
        if deadline_s <= began_s or not self._breaker.allows():
            self._count(loads_refused=1)
            return 0
        keys = memory.keys([block.block_hash for block in job.blocks])
        buffers = [memory.buffers(block.block_id) for block in job.blocks]
        try:
            sizes = self._client.get_many_into(keys, buffers, deadline_s=deadline_s - began_s)
        except TanghuluError as error:
            sizes = [error]
        num_good = next((at for at, size in enumerate(sizes) if size != memory.block_bytes), len(sizes))
        self._breaker.judge([size for size in sizes if isinstance(size, TanghuluError)])
        took_s = self._clock.now_s() - began_s
        self._count(loads=1, blocks_loaded=num_good, blocks_not_loaded=len(keys) - num_good, load_s=took_s)
        return num_good

    def _save(self, job: SaveJob) -> None:
        try:
            self._write(job)
        finally:
            self._ended.put(job)

    def _write(self, job: SaveJob) -> None:
        if not self._breaker.allows():
            self._count(blocks_not_saved=len(job.blocks))
            return
        began_s, keys = self._clock.now_s(), self._memory.keys([block.block_hash for block in job.blocks])
        items = [(key, self._memory.buffers(block.block_id)) for key, block in zip(keys, job.blocks, strict=True)]
        try:
            statuses = self._client.put_many(items, deadline_s=self._options.save_deadline_s)
        except TanghuluError as error:
            self._breaker.judge([error])
            self._count(blocks_not_saved=len(items))
            return
        errors = [status.error for status in statuses if status.error is not None]
        self._breaker.judge(errors)
        took_s = self._clock.now_s() - began_s
        self._count(saves=1, blocks_saved=len(items) - len(errors), blocks_not_saved=len(errors), save_s=took_s)

    def _count(self, **amounts: float) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self.counts[name] += amount
