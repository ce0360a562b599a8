"""Promotion of requested chunks from the SSD, and demotion of chunks when the node stops.

One promotion per key at a time, for any number of requests; at most ``MAX_PROMOTIONS`` together, others wait their
turn. Waiters wait until their own deadlines; the promotion itself continues for later ones. Owns the waiting around
``SsdTier.reading`` and ``NodeState``'s decisions about room.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence

from tanghulu.errors import ChunkNotFound, DeadlineExceeded, StoreFull, TanghuluError
from tanghulu.store.node.ssd.tier import SsdTier
from tanghulu.store.node.state.chunk import Chunk
from tanghulu.store.node.state.counters import EvictionReason
from tanghulu.store.node.state.node_state import NodeState
from tanghulu.store.node.state.ssd_chunk import SsdChunk
from tanghulu.store.node.state.ssd_record import MAX_HEAD_BYTES, UNIT
from tanghulu.store.protocol.types import Pin
from tanghulu.types import ChunkKey, format_size

MAX_PROMOTIONS = 32
#: Keys of one get promoted together.
LOOK_AHEAD = 8
#: Seconds that one promotion may take.
PROMOTION_DEADLINE_S = 5.0
#: Seconds for which an orderly stopping node writes its memory to the disk.
SEND_DOWN_S = 3.0
#: Bytes copied for the disk in one step of the loop.
STEP_BYTES = 8 << 20


class Promoter:
    """See the module. ``view`` is the node's memory."""

    def __init__(self, state: NodeState, tier: SsdTier, view: memoryview) -> None:
        self._state, self._chunks = state, state.chunks
        self._tier = tier
        self._view = view
        self._under_way: dict[ChunkKey, asyncio.Task[Chunk]] = {}
        self._turns = asyncio.Semaphore(MAX_PROMOTIONS)
        self._room_changes = asyncio.Event()  # set for a moment
        self._pinned: asyncio.Task[None] | None = None

    def bring_up_pinned(self) -> None:
        """Begin to promote hard-pinned chunks, one after the other: they belong in memory even without requests."""
        self._pinned = asyncio.create_task(self._bring_up_pinned())

    def is_cold(self, keys: Iterable[str]) -> bool:
        """Return whether any of ``keys`` would have to be promoted first."""
        find, below = self._chunks.find, self._tier.find
        return any(find(ChunkKey(key)) is None and below(ChunkKey(key)) is not None for key in keys)

    async def each(self, keys: Sequence[str], until_s: float) -> AsyncIterator[tuple[str, TanghuluError | None, bool]]:
        """Promote ``keys`` in order, a few ahead; yield (key, its error or None, whether it was promoted) in its turn.

        Use a key's chunk before asking for the next one: it may be evicted then. A key in neither tier comes without an
        error.
        """
        cold: set[str] = set()
        for index, key in enumerate(keys):
            cold.update(ahead for ahead in keys[index : index + LOOK_AHEAD] if self.begin(ChunkKey(ahead)))
            if key not in cold:
                yield key, None, False
                continue
            try:
                await self.chunk(ChunkKey(key), until_s)
                self._tier.counters.hits += 1
                yield key, None, True
            except ChunkNotFound:
                yield key, None, False
            except TanghuluError as error:
                yield key, error, False

    def begin(self, key: ChunkKey) -> bool:
        """Start promoting ``key``, if it is in the tier alone; return whether it is being promoted now."""
        if key in self._under_way or self._chunks.find(key) is not None:
            return key in self._under_way
        entry = self._tier.find(key)
        if entry is not None:
            task = asyncio.create_task(self._promote(entry))
            self._under_way[key] = task
            task.add_done_callback(lambda done: self._ended(key, done))
        return entry is not None

    async def chunk(self, key: ChunkKey, until_s: float) -> Chunk:
        """Return the LIVE chunk of ``key`` in memory; use it before the next await. ``until_s``: the loop's time.

        Raises ChunkNotFound, StoreFull if leases leave no room for it, DeadlineExceeded.
        """
        for _ in range(3):  # it may be evicted again before this coroutine runs
            chunk = self._chunks.find(key)
            if chunk is not None:
                return chunk
            self.begin(key)
            task = self._under_way.get(key)
            if task is None:
                break
            done, _ = await asyncio.wait([task], timeout=max(until_s - asyncio.get_running_loop().time(), 0.0))
            if not done:
                raise DeadlineExceeded(f"{key!r} is still being read from the SSD tier; try again")
            task.result()
        chunk = self._chunks.find(key)
        if chunk is None:
            raise ChunkNotFound(f"{key!r} is not on this node")
        return chunk

    def room_changed(self) -> None:
        """Retry promotions that wait for room, as ranges were freed or chunks became evictable."""
        self._room_changes.set()
        self._room_changes.clear()

    @property
    def num_decided(self) -> int:
        """See SsdTier.settled."""
        return self._tier.num_given

    async def settled(self, since: int, until_s: float) -> None:
        """See SsdTier.settled: removed chunks stay removed."""
        await self._tier.settled(since, until_s)

    async def close(self) -> None:
        """End all promotions."""
        tasks: list[asyncio.Task[Chunk] | asyncio.Task[None]] = list(self._under_way.values())
        if self._pinned is not None:
            tasks.append(self._pinned)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def send_down(self) -> None:
        """Demote memory's chunks for the node's next start, as far as ``SEND_DOWN_S`` allows; the warmest first."""
        until_s = asyncio.get_running_loop().time() + SEND_DOWN_S
        step_bytes = 0
        for chunk in self._chunks.warmest():
            try:
                if self._tier.free_queue_bytes < chunk.size_bytes + MAX_HEAD_BYTES + UNIT:
                    await self._tier.performed(until_s)
                elif step_bytes > STEP_BYTES:
                    await asyncio.sleep(0)
                    step_bytes = 0
            except DeadlineExceeded:
                return
            self._chunks.evict(chunk, EvictionReason.STOPPING)
            step_bytes += chunk.size_bytes

    # --- inside

    async def _bring_up_pinned(self) -> None:
        for key in [entry.key for entry in self._tier.entries() if entry.pin is Pin.HARD]:
            self.begin(key)
            if key in self._under_way:
                await asyncio.wait([self._under_way[key]])

    def _ended(self, key: ChunkKey, task: asyncio.Task[Chunk]) -> None:
        del self._under_way[key]
        if not task.cancelled():
            task.exception()  # waiters have received it; there may be none

    async def _promote(self, entry: SsdChunk) -> Chunk:
        until_s = asyncio.get_running_loop().time() + PROMOTION_DEADLINE_S
        async with self._turns, self._tier.reading(entry, until_s) as value:
            chunk = await self._room_for(entry, until_s)
            self._view[chunk.offset : chunk.offset + chunk.size_bytes] = value
            live = self._state.promote(chunk, entry)
            self._tier.promoted(entry)
            return live

    async def _room_for(self, entry: SsdChunk, until_s: float) -> Chunk:
        loop = asyncio.get_running_loop()
        while (chunk := self._state.reserve_promotion(entry)) is None:
            if self._chunks.has_more_to_evict and loop.time() < until_s:
                await asyncio.sleep(0)
                continue
            try:
                async with asyncio.timeout_at(until_s):
                    await self._room_changes.wait()
            except TimeoutError:
                raise StoreFull(
                    f"no room in memory for {entry.key!r} from the SSD tier ({format_size(entry.size_bytes)}): all "
                    "chunks there are leased, being written or hard-pinned; try again"
                ) from None
        return chunk
