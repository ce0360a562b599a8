"""The chunks of a node, in memory and in the tier below: finding, entering, evicting and dropping chunks.

Owns the chunk table, the space, the lower tier, the tenants' shares and the counters; keeps them in step with each
other and with the reports to the masters. Has no puts, sessions or queue: callers that fill a range, or lease one,
record it here.
"""

from __future__ import annotations

from collections.abc import Callable

from tanghulu.auth.tenants import tenant_of
from tanghulu.errors import StoreFull
from tanghulu.eviction.base import Policy
from tanghulu.runtime.clock import Clock
from tanghulu.store.node.space.space import STEP_RESIDENTS, Space
from tanghulu.store.node.state.chunk import Chunk, ChunkEvent, ChunkState
from tanghulu.store.node.state.chunk_table import ChunkTable
from tanghulu.store.node.state.counters import EvictionReason, HotKeys, NodeCounters
from tanghulu.store.node.state.holdings import Holding, LowerTier
from tanghulu.store.node.state.limits import HardPins
from tanghulu.store.node.state.reports import NodeReports
from tanghulu.store.node.state.ssd_chunk import SsdChunk
from tanghulu.store.node.state.tenant_usage import TenantUsage
from tanghulu.store.protocol.types import NewChunk, Pin
from tanghulu.types import ChunkKey

#: Chunks evicted in one tick ahead of demand, for a quota, or because they expired: some 10 ms.
MAX_AHEAD = 512
#: A tenant's next victims checked for the room of a put above its quota, at each step.
QUOTA_LOOK = 4 * STEP_RESIDENTS


class NodeChunks:
    """See the module. ``on_freed`` is called with the number of bytes that became free, or evictable, each time."""

    def __init__(
        self,
        table: ChunkTable,
        space: Space[Chunk],
        tier: LowerTier,
        reports: NodeReports,
        tenants: TenantUsage | None,
        *,
        clock: Clock,
        on_freed: Callable[[int], None],
    ) -> None:
        self.table = table
        self.space = space
        self.tier = tier
        self.tenants = tenants
        self.counters, self.hot = NodeCounters(), HotKeys()
        self._reports = reports
        self._hard_pins = HardPins(space.allocator.capacity_bytes, tenants)
        self._clock = clock
        self._on_freed = on_freed
        self._exceeds_quota = False  # the last requested range has to wait for more evictions by its quota

    @property
    def capacity_bytes(self) -> int:
        """Bytes that the segment can hold."""
        return self.space.allocator.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the segment that are not free, reservations and condemned chunks included."""
        return self.space.allocator.used_bytes

    def __len__(self) -> int:
        """Number of chunks in memory that have their keys."""
        return len(self.table)

    # --- look-ups

    def find(self, key: ChunkKey) -> Chunk | None:
        """Return the LIVE chunk of ``key``; neither touches nor pins it."""
        chunk = self.table.find(key)
        return chunk if chunk is not None and chunk.state is ChunkState.LIVE and not self._is_over(chunk) else None

    def find_below(self, key: ChunkKey) -> SsdChunk | None:
        """Return the chunk of ``key`` in the tier below."""
        return self.tier.find(key)

    def holds(self, key: ChunkKey) -> bool:
        """Return whether a get would find ``key`` here, in memory or below."""
        return self.find(key) is not None or self.tier.find(key) is not None

    def current(self, key: ChunkKey) -> Chunk | None:
        """Return the ANNOUNCING or LIVE chunk of ``key``; an expired one is dropped here."""
        chunk = self.table.find(key)
        if chunk is not None and self._is_over(chunk):
            self._end_of_time(chunk)
            return None
        return chunk

    def current_anywhere(self, key: ChunkKey) -> Holding | None:
        """Return the current chunk of ``key`` in memory, or else below."""
        return self.current(key) or self.tier.find(key)

    def all_keys(self) -> list[ChunkKey]:
        """Return all keys of ANNOUNCING and LIVE chunks in memory, and of chunks below; some twice."""
        return [*self.table.keys(), *(entry.key for entry in self.tier.entries())]

    def look_up(self, key: ChunkKey) -> Chunk | None:
        """Do as ``find``, counting a hit or a miss; a reader calls ``touch`` when it has all its keys."""
        chunk = self.find(key)
        if self.tenants is not None:
            self.tenants.looked_up(key, chunk)
        if chunk is None:
            self.counters.misses += 1
            return None
        self.counters.hit(chunk.size_bytes)
        self.hot.read(chunk)
        return chunk

    def touch(self, chunks: list[Chunk]) -> None:
        """Record one call's reads of ``chunks``, in the order of its prompt."""
        self.space.end_batch()
        for chunk in chunks:
            self.space.touch(chunk)
        self.space.end_batch()

    def put_again(self, holding: Holding) -> None:
        """Count a put of an existing key, and keep its chunk longer for it."""
        self.counters.puts_existed += 1
        if isinstance(holding, Chunk):
            self.space.touch(holding)
        else:
            self.tier.touch(holding)

    def left_s(self, holding: Holding) -> float | None:
        """Return the remaining seconds of ``holding``; None: without end."""
        return None if holding.expires_s is None else holding.expires_s - self._clock.now_s()

    def age_s(self, chunk: Chunk) -> float:
        """Return the seconds since the chunk was reserved."""
        return self._clock.now_s() - chunk.created_s

    # --- room for a chunk, and entering it

    def refuse_hard_pin(self, key: ChunkKey, size_bytes: int) -> StoreFull | None:
        """Return the error of a put of ``key`` that would pin too much hard."""
        return self._hard_pins.refusal(key, size_bytes, self.table.hard_pinned_bytes)

    @property
    def has_more_to_evict(self) -> bool:
        """Whether to request the last requested range again, as room is made in steps."""
        return self._exceeds_quota or self.space.has_more_to_do

    def take_range(self, new: NewChunk) -> int | None:
        """Take a range for ``new`` within its tenant's quota; None if there is none yet, see Space.take.

        Raises InvalidRequest for a value above the quota, QuotaExceeded if the tenant's chunks cannot be evicted now:
        before anything is evicted, if ``QUOTA_LOOK`` of its chunks are all that it has or would make the room.
        """
        tenants = self.tenants
        self._exceeds_quota = False
        if tenants is not None and (excess_bytes := tenants.excess_bytes(new)):
            tenant = tenant_of(new.key)
            chosen, missing_bytes = self.space.oldest_of(tenant, excess_bytes, QUOTA_LOOK)
            if missing_bytes > 0 and len(chosen) < QUOTA_LOOK:
                raise tenants.no_room(tenant)
            self._exceeds_quota = missing_bytes > 0 or len(chosen) > STEP_RESIDENTS
            for chunk in chosen[:STEP_RESIDENTS]:
                self.evict(chunk, EvictionReason.QUOTA)
            if self._exceeds_quota:
                return None
        return self.space.take(new.size_bytes, self.evict)

    def carve(self, wanted_bytes: int, least_bytes: int) -> tuple[int, int] | None:
        """Take a range for a write buffer: (offset, length), see Space.carve."""
        return self.space.carve(
            wanted_bytes,
            least_bytes,
            self.tier.free_queue_bytes,  # beyond it chunks would be dropped; watermarks make room at the disk's pace
            lambda chunk: self.evict(chunk, EvictionReason.WRITE_BUFFER),
        )

    def stop_making_room(self) -> None:
        """Stop making room: nobody waits for a range any more."""
        self.space.stop_vacating()

    def has_quota(self, key_scope: str) -> bool:
        """Return whether a quota bounds the tenant of that scope."""
        return self.tenants is not None and self.tenants.limit_of(tenant_of(key_scope)) > 0

    def enter(self, chunk: Chunk) -> None:
        """Enter a reservation on a range taken for it."""
        self.table.enter(chunk)
        if self.tenants is not None:
            self.tenants.entered(chunk)

    def publish(self, chunk: Chunk, event: ChunkEvent) -> None:
        """Give a reservation its key, as its bytes are in place."""
        self.table.publish(chunk, event)
        if chunk.state is ChunkState.LIVE:
            self._settle(chunk)

    def go_live(self, chunk: Chunk, event: ChunkEvent) -> None:
        """Make an announced chunk LIVE: the master has decided, or nobody waits for it any more."""
        was_live = chunk.state is ChunkState.LIVE
        self.table.go_live(chunk, event)
        if not was_live:
            self._settle(chunk)

    def _settle(self, chunk: Chunk) -> None:
        self.space.settle(chunk)
        self._on_freed(chunk.size_bytes)

    def abort_reservation(self, chunk: Chunk) -> None:
        """Drop a reservation whose put failed; its range is free when it has no lease.

        A commit that its client may have sent to the master is retracted, unless the same put has its chunk here.
        """
        self.table.condemn(chunk)
        current = self.table.find(chunk.key) or self.tier.find(chunk.key)
        if current is None or current.version != chunk.version:
            self._reports.retract(chunk.key, chunk.version)
        if chunk.num_leases == 0:
            self._free(chunk)

    def leases_changed(self, chunk: Chunk) -> None:
        """Update a chunk after its first lease began or its last one ended: it can be evicted, or its range is free."""
        if chunk.is_live:
            self.space.refresh(chunk)
            if chunk.num_leases == 0:
                self._on_freed(chunk.size_bytes)
        elif chunk.state is ChunkState.CONDEMNED and chunk.num_leases == 0:
            self._free(chunk)

    # --- the end of chunks

    def remove(self, key: ChunkKey) -> bool:
        """Drop the chunk on a client's order, here and below; return whether there was one."""
        holding = self.current_anywhere(key)
        if holding is None:
            return False
        self.counters.removed += 1
        self.drop_both(key)
        self._reports.remove(holding, deleted=True)
        return True

    def let_go(self, key: ChunkKey, version: int, *, removed: bool = False) -> None:
        """Drop the chunk of that version here and below, because it was ``removed`` at another of its holders.

        Otherwise the reason is that another node has a copy now; then a hard-pinned one stays.
        """
        holding = self.current_anywhere(key)
        if holding is not None and holding.version == version and (removed or holding.pin is not Pin.HARD):
            self.drop_both(key)
            self._reports.remove(holding, deleted=removed)

    def drop_corrupt(self, chunk: Chunk) -> None:
        """Drop a chunk whose bytes do not match its checksums; a copy below stays."""
        self.counters.corrupt += 1
        self._left_memory(chunk, self.tier.find(chunk.key))
        self._drop(chunk)

    def drop_both(self, key: ChunkKey) -> None:
        """Drop the chunks of ``key`` here and below; reporting that to the master is the caller's business."""
        entry, chunk = self.tier.find(key), self.table.find(key)
        if entry is not None:
            self.tier.drop(entry)
        if chunk is not None:
            self._drop(chunk)

    def expire(self, now_s: float) -> None:
        """End expired chunks; to be called at every tick."""
        self.counters.largest_free_bytes = self.space.allocator.largest_free_bytes
        self.tier.expire(now_s)
        for chunk in self.table.expired(now_s, MAX_AHEAD):
            self._end_of_time(chunk)

    def _end_of_time(self, chunk: Chunk) -> None:
        self.counters.expired += 1
        self._reports.remove(chunk)
        self._drop(chunk)

    def _is_over(self, chunk: Chunk) -> bool:
        return chunk.expires_s is not None and chunk.expires_s <= self._clock.now_s()

    def _drop(self, chunk: Chunk, *, evicted: bool = False) -> None:
        if chunk.state is ChunkState.LIVE:
            self.space.leave(chunk, evicted=evicted)
        self.table.condemn(chunk)
        if chunk.num_leases == 0:
            self._free(chunk)

    def _free(self, chunk: Chunk) -> None:
        self.table.forget(chunk)
        if self.tenants is not None:
            self.tenants.left(chunk)
        self.space.allocator.free(chunk.offset, chunk.size_bytes)
        self._on_freed(chunk.size_bytes)

    # --- eviction

    def evict(self, chunk: Chunk, reason: EvictionReason = EvictionReason.ROOM) -> None:
        """Evict a LIVE chunk from memory; its range is free when nobody reads it."""
        self.counters.evicted(chunk.size_bytes, reason)
        self._left_memory(chunk, self.tier.demote(chunk, self.left_s(chunk)))
        self._drop(chunk, evicted=True)

    def evict_ahead(self, num_bytes: int, max_num: int = MAX_AHEAD) -> None:
        """Evict the next victims ahead of demand: up to ``num_bytes``, at most ``max_num``."""
        for chunk in self.space.oldest(num_bytes, max_num):
            self.evict(chunk, EvictionReason.WATERMARK)

    def evict_oldest(self, num_bytes: int, reason: EvictionReason) -> list[Chunk]:
        """Evict the next victims, up to ``num_bytes``, and return them."""
        chosen = self.space.oldest(num_bytes)
        for chunk in chosen:
            self.evict(chunk, reason)
        return chosen

    def trim_tenants(self) -> None:
        """Evict the excess of tenants that hold more on other nodes; to be called now and then."""
        for tenant, excess_bytes in () if self.tenants is None else self.tenants.overdrawn():
            for chunk in self.space.oldest_of(tenant, excess_bytes, MAX_AHEAD)[0]:
                self.evict(chunk, EvictionReason.QUOTA)

    def warmest(self) -> list[Chunk]:
        """Return all chunks worth keeping for the node's next start: hard-pinned ones, then the last to be evicted."""
        pinned = [chunk for chunk in self.table if chunk.is_live and chunk.pin is Pin.HARD]
        return [*pinned, *reversed(list(self.space.victims()))]

    @property
    def eviction_policy(self) -> str:
        """The policy of evictions from memory."""
        return self.space.policy_name

    def switch_policies(self, memory: Callable[[], Policy], tier: Callable[[], Policy]) -> None:
        """Let other policies order the evictions from memory and from the tier below."""
        self.space.switch_policy(memory)
        self.tier.switch_policy(tier)

    def _left_memory(self, chunk: Chunk, entry: SsdChunk | None) -> None:
        """Report to the master that the node has no copy any more, or in which tier it has one now."""
        if entry is None:
            self._reports.remove(chunk)
        else:
            self._reports.add(entry)

    # --- the master, and the end of a call

    def begin_reports(self) -> None:
        """Begin the reports requested by masters, of all chunks in memory and below, each key once."""
        self._reports.begin_reports([*self.table, *self.tier.entries()], self._is_reported)

    def _is_reported(self, holding: Holding) -> bool:
        if isinstance(holding, Chunk):
            return holding.state is ChunkState.LIVE
        return holding.held and self.table.find(holding.key) is None

    @property
    def writing(self) -> bool:
        """Whether a reservation may still become a chunk."""
        return self.table.writing

    def end_batch(self) -> None:
        """End one call's batch of puts and reads, for the order of evictions."""
        self.space.end_batch()

    def end_call(self) -> None:
        """Finish a client's call: its chunks enter the order of evictions, and the index read by clients."""
        self.space.end_batch()
        self.table.flush()

    def check(self, others: list[tuple[int, int]]) -> None:
        """Assert the invariants of all parts, and that chunks, free ranges and ``others`` are the whole memory."""
        self.table.check()
        self.space.check()
        self.hot.check()
        if self.tenants is not None:
            self.tenants.check(self.table)
        chunks = ((c.offset, c.size_bytes) for c in self.table)
        self.space.allocator.check_tiles([*chunks, *others, *self.space.in_between])
        for chunk in filter(None, map(self.table.find, self.table.keys())):
            assert (chunk in self.space) == (chunk.state is ChunkState.LIVE and chunk.pin is not Pin.HARD)

    def __repr__(self) -> str:
        return f"NodeChunks({len(self.table)}, {self.used_bytes}/{self.capacity_bytes} B)"
