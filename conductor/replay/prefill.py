"""A simulated prefill worker: an LRU cache of blocks, a queue, one prefill at a time, a NIC in each direction.

Independent of policies and of the event loop; the simulation supplies each event and its time.
"""

from __future__ import annotations

import abc
from collections import Counter, OrderedDict
from collections.abc import Sequence

from tanghulu.conductor.replay.model import Job


class BlockCache:
    """Resident blocks, least recently used first. Chains are touched tail first, so that leaves are evicted first.

    Evicted blocks move to an SSD with room for ``ssd_blocks``, and count as resident there, too.
    """

    def __init__(self, capacity_blocks: int, ssd_blocks: int = 0) -> None:
        assert capacity_blocks > 0
        self.capacity_blocks, self._ssd_blocks = capacity_blocks, ssd_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._ssd: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._blocks or block in self._ssd

    def __len__(self) -> int:
        return len(self._blocks)

    def leading(self, blocks: Sequence[int]) -> int:
        """Return the number of leading blocks that are resident."""
        resident, ssd = self._blocks, self._ssd
        for index, block in enumerate(blocks):
            if block not in resident and block not in ssd:
                return index
        return len(blocks)

    def load(self, blocks: Sequence[int]) -> int:
        """Move those of ``blocks`` that are on the SSD to memory; return their number."""
        found = [block for block in blocks if block in self._ssd]
        self.insert(found)
        return len(found)

    def touch(self, blocks: Sequence[int]) -> None:
        resident = self._blocks
        for block in reversed(blocks):
            if block in resident:
                resident.move_to_end(block)

    def insert(self, blocks: Sequence[int]) -> None:
        """Make ``blocks`` resident; the least recently used are evicted if there is no room."""
        resident = self._blocks
        for block in reversed(blocks):
            resident[block] = None
            resident.move_to_end(block)
            self._ssd.pop(block, None)
        self._evict()

    def insert_copies(self, blocks: Sequence[int]) -> None:
        """Make ``blocks`` resident that another worker keeps, too: new ones are evicted before all others."""
        resident = self._blocks
        for block in blocks:
            if block not in resident:
                resident[block] = None
                resident.move_to_end(block, last=False)
        self._evict()

    def _evict(self) -> None:
        while len(self._blocks) > self.capacity_blocks:
            block, _ = self._blocks.popitem(last=False)
            if self._ssd_blocks:
                self._ssd[block] = None
                if len(self._ssd) > self._ssd_blocks:
                    self._ssd.popitem(last=False)


class CachingInstance(abc.ABC):
    """Queue, cache and NICs of a worker that prefills. ``coming`` counts blocks of requests not yet prefilled."""

    def __init__(self, index: int, cache: BlockCache) -> None:
        self.index = index
        self.cache = cache
        self.queue: list[Job] = []
        self.coming: Counter[int] = Counter()
        self.send_free_s = 0.0
        self.receive_free_s = 0.0
        self.ssd_free_s = 0.0
        self.busy_s = 0.0

    def match(self, blocks: Sequence[int], first: int = 0) -> int:
        """Return the number of leading blocks resident or coming; the first ``first`` are known to be."""
        cache, coming = self.cache, self.coming
        for index in range(first, len(blocks)):
            if blocks[index] not in cache and blocks[index] not in coming:
                return index
        return len(blocks)

    @abc.abstractmethod
    def waiting_s(self, now_s: float) -> float:
        """Estimate the seconds until everything here has been prefilled."""

    @abc.abstractmethod
    def enqueue(self, job: Job) -> None:
        """Accept a job; its blocks count as coming from now on."""

    def reuse(self, job: Job) -> None:
        """Set the job's hits as its prefill begins: resident blocks, and fetched ones, which count as held."""
        blocks = job.request.blocks
        held = self.cache.leading(blocks)
        if job.fetch_blocks > held:
            held = job.fetch_blocks + self.cache.leading(blocks[job.fetch_blocks :])
        self.cache.touch(blocks[:held])
        job.hit_tokens = min(held * job.request.block_tokens, job.request.num_tokens - 1)
        job.queued_tokens = job.request.num_tokens - job.hit_tokens

    def _computed(self, job: Job) -> None:
        """Make the blocks of a prefilled job resident; they are no longer coming."""
        for block in job.request.blocks:
            self.coming[block] -= 1
            if self.coming[block] <= 0:
                del self.coming[block]
        self.cache.insert(job.request.blocks)

    def _check_coming(self, jobs: Sequence[Job]) -> None:
        assert Counter(block for job in jobs for block in job.request.blocks) == self.coming
        assert len(self.cache) <= self.cache.capacity_blocks


class PrefillInstance(CachingInstance):
    """A worker that only prefills, one request at a time."""

    def __init__(self, index: int, cache: BlockCache) -> None:
        super().__init__(index, cache)
        self.current: Job | None = None
        self._queued_s = 0.0

    def waiting_s(self, now_s: float) -> float:
        """Estimate the seconds until everything here has been prefilled, by observed progress and expected cost."""
        return self._queued_s + self._current_left_s(now_s)

    @property
    def waiting_tokens(self) -> int:
        """Tokens still to be computed, as the conductor counted them."""
        return sum(job.queued_tokens for job in self.queue) + (self.current.queued_tokens if self.current else 0)

    @property
    def num_jobs(self) -> int:
        return len(self.queue) + (self.current is not None)

    def enqueue(self, job: Job) -> None:
        """Enqueue a job; its blocks count as coming from now on."""
        self.queue.append(job)
        self._queued_s += job.estimate_s
        self.coming.update(job.request.blocks)

    def take(self, position: int) -> Job:
        """Take the job at ``position`` out of the queue; it becomes the current one."""
        assert self.current is None
        job = self.current = self.queue.pop(position)
        self._queued_s -= job.estimate_s
        return job

    def finish(self) -> Job:
        """End the current job, now prefilled: its blocks are resident."""
        job, self.current = self.current, None
        assert job is not None
        self._computed(job)
        return job

    def check(self) -> None:
        self._check_coming([*self.queue, *([self.current] if self.current else [])])
        assert abs(self._queued_s - sum(job.estimate_s for job in self.queue)) < 1e-3

    def _current_left_s(self, now_s: float) -> float:
        job = self.current
        if job is None:
            return 0.0
        if now_s <= job.begin_s:
            return job.begin_s + job.planned_s - now_s
        left_s = job.begin_s + job.prefill_s - now_s
        return left_s * (job.planned_s / job.prefill_s) if left_s > 0 else 0.0
