"""The decisions of a store node: what it holds, who may touch it, what goes when room is needed.

Pure: requests and times go in, outcomes come out; bytes, sockets and the master are the shell's (``service``,
``announcer``). What the master has to be told collects in ``announcements``. Not thread-safe: one event loop owns it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

from tanghulu.errors import InvalidRequest, LeaseExpired, Overloaded, StoreFull, TanghuluError
from tanghulu.eviction.base import Policy
from tanghulu.runtime.clock import Clock
from tanghulu.store.node.state.allocator import OffsetAllocator
from tanghulu.store.node.state.chunk import Chunk, ChunkEvent, ChunkState, compact
from tanghulu.store.node.state.chunk_table import ChunkTable
from tanghulu.store.node.state.granting import grant
from tanghulu.store.node.state.holdings import Holding, LowerTier, NoTier
from tanghulu.store.node.state.hot_keys import HotKeys
from tanghulu.store.node.state.limits import no_room, refuse_impossible, refuse_while
from tanghulu.store.node.state.outcomes import EvictionReason, Existed, NodeCounters, Outcome, Pinned, Reserved
from tanghulu.store.node.state.proclaimed import forsake
from tanghulu.store.node.state.report_queue import AnnouncementQueue
from tanghulu.store.node.state.space import Room
from tanghulu.store.node.state.ssd_chunk import TierEntry
from tanghulu.store.node.state.tenant_usage import take_range
from tanghulu.store.node.state.waiters import Holder, Waiter, WaitQueue
from tanghulu.store.node.state.write_buffer_holdings import DeskHoldings, NoDesks
from tanghulu.store.protocol.checksums import Checksums, validate
from tanghulu.store.protocol.types import NewChunk, Pin
from tanghulu.transfer_engine.core.access import AccessTable
from tanghulu.transfer_engine.core.leases import Freed
from tanghulu.transfer_engine.core.slices import Opcode
from tanghulu.types import ChunkKey, LeaseId


class NodeState:
    """See the module. ``lease_ms`` of ``access`` bounds reservations and pins of peers that get copies."""

    def __init__(
        self, capacity_bytes: int, access: AccessTable, make_policy: Callable[[], Policy], clock: Clock
    ) -> None:
        self.access, self.table = access, ChunkTable()
        self.room = Room(OffsetAllocator(capacity_bytes), self.table, make_policy, lambda: self.desks.ranges())
        self.announcements, self.waiters = AnnouncementQueue(), WaitQueue()
        self.counters, self.hot = NodeCounters(), HotKeys()
        self.tier: LowerTier = NoTier()
        self.desks: DeskHoldings = NoDesks()
        self.draining = False  # takes no new chunks
        self.max_value_bytes = capacity_bytes
        self._clock = clock

    @property
    def capacity_bytes(self) -> int:
        """What the segment can hold."""
        return self.room.allocator.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the segment that are not free, reservations and condemned chunks included."""
        return self.room.allocator.used_bytes

    # --- puts

    def reserve(self, new: NewChunk, holder: Holder | None) -> Outcome:
        """A range for ``new`` (RESERVED under a write lease), or that the key is there, or a place in the queue.

        Raises InvalidRequest for a value that can never fit, StoreFull if hard pins are used up, Overloaded if too many
        wait or the holder has too many leases.
        """
        return self.reserve_at_once(new, holder) or self.wait_for_room(new, holder)

    def reserve_at_once(self, new: NewChunk, holder: Holder | None) -> Reserved | Existed | None:
        """As ``reserve``, but None instead of a place in the queue."""
        return self._admit(new, holder, may_pass=not len(self.waiters), sparing=False)

    def wait_for_room(self, new: NewChunk, holder: Holder | None) -> Waiter:
        """A place in the queue; raises Overloaded if too many wait."""
        waiter = Waiter(new, holder)
        self.waiters.join(waiter)
        self.counters.lease_waits += 1
        return waiter

    def admit_waiters(self) -> list[tuple[Waiter, Reserved | Existed | TanghuluError]]:
        """Serve the queue as far as there is room now; to be called after anything was freed or became evictable."""
        served: list[tuple[Waiter, Reserved | Existed | TanghuluError]] = []
        while len(self.waiters):
            waiter = self.waiters.first()
            outcome: Reserved | Existed | TanghuluError | None
            try:
                outcome = self._admit(waiter.new, waiter.holder, may_pass=True, sparing=True)
            except TanghuluError as error:  # its session is gone, hard pins are used up meanwhile, the node drains
                outcome = error
            if outcome is None:
                break
            self.waiters.leave(waiter)
            served.append((waiter, outcome))
        return served

    def _admit(
        self, new: NewChunk, holder: Holder | None, *, may_pass: bool, sparing: bool
    ) -> Reserved | Existed | None:
        refuse_impossible(new, self.max_value_bytes, self.capacity_bytes, self.table.hard_pinned_bytes)
        if (existing := self.standing_anywhere(new.key)) is not None:
            return self._existed(existing)
        refuse_while(self.draining)
        return self.try_reserve(new, holder, sparing=sparing) if may_pass else None

    def give_up_waiting(self, waiter: Waiter) -> StoreFull:
        """The put's deadline came first; the error to answer it with."""
        self.waiters.leave(waiter)
        self.counters.store_full += 1
        return no_room(waiter.new, self.capacity_bytes)

    def end_writing(self, lease_id: LeaseId, session_id: int) -> Chunk:
        """The holder has written this reservation, which has no lease now. Raises LeaseExpired, and it is gone."""
        chunk = self.table.leased(lease_id)
        lease = self.access.lease(lease_id)
        if chunk is None or lease is None or lease.session_id != session_id or chunk.state is not ChunkState.RESERVED:
            raise LeaseExpired(f"reservation {lease_id} has ended; reserve again")
        active = self.access.is_active(lease_id)
        freed = self.access.release(lease_id)
        if not active or not freed:
            forsake(self, chunk)
            self.freed(freed)
            raise LeaseExpired(f"reservation {lease_id} of {chunk.key!r} has ended, or is still written; reserve again")
        self.table.unlease(lease_id)
        return chunk

    def commit_written(
        self, chunk: Chunk, checksums: Checksums, *, visible: bool, patient: bool = False
    ) -> Reserved | Existed:
        """The bytes of a reservation are in place and nobody writes any more; asserts that it has no lease."""
        assert chunk.num_leases == 0, f"{chunk.key!r} is still leased"
        existing = self.standing_anywhere(chunk.key)
        if existing is not None:
            self.abandon(chunk)
            return self._existed(existing)
        try:
            validate(checksums, chunk.size_bytes)
        except InvalidRequest:
            self.abandon(chunk)
            raise
        chunk.compact_checksums = compact(checksums)
        self.table.publish(chunk, ChunkEvent.COMMIT if visible else ChunkEvent.COMMIT_UNSEEN)
        if chunk.state is ChunkState.LIVE:
            self.room.settle(chunk)
        self.announcements.add(chunk, patient=patient)
        self.counters.puts += 1
        return Reserved(chunk, LeaseId(0))

    def abandon(self, chunk: Chunk) -> None:
        """Nobody will write this reservation, which has no lease."""
        forsake(self, chunk)
        self._free(chunk)

    # --- what the master said

    def announced(self, chunk: Holding, *, accepted: bool) -> None:
        """The master has taken note of ``chunk``, or knows an older put of its key."""
        if not chunk.held:
            return  # dropped meanwhile; the master is being told
        if not accepted:
            self.counters.refused += 1
            self.announcements.forget(chunk)
            self.drop_both(chunk.key)
        elif isinstance(chunk, Chunk):
            self._go_live(chunk, ChunkEvent.ACCEPTED)

    def gave_up(self, chunk: Holding) -> None:
        """Nobody waits for the master's answer any more: the chunk is served to those who ask here."""
        if isinstance(chunk, Chunk) and chunk.state is ChunkState.ANNOUNCING:
            self._go_live(chunk, ChunkEvent.GAVE_UP)

    def live_chunks(self) -> list[Holding]:
        """Everything that a report to a new master lists, each key once."""
        self.desks.drain()
        below = [entry for entry in self.tier.entries() if self.table.find(entry.key) is None]
        return [*(c for c in self.table if c.state is ChunkState.LIVE), *below]

    def left_s(self, holding: Holding) -> float | None:
        """How long it has to live; None: without end."""
        return None if holding.expires_s is None else holding.expires_s - self._clock.now_s()

    def age_s(self, chunk: Chunk) -> float:
        """How long ago the chunk was reserved."""
        return self._clock.now_s() - chunk.created_s

    # --- gets

    def find(self, key: ChunkKey) -> Chunk | None:
        """The LIVE chunk of ``key``; neither touches nor pins it."""
        chunk = self.table.find(key)
        return chunk if chunk is not None and chunk.state is ChunkState.LIVE and not self._is_over(chunk) else None

    def holds(self, key: ChunkKey) -> bool:
        """Whether a get would find ``key`` here, in memory or below."""
        return self.find(key) is not None or self.tier.find(key) is not None

    def look_up(self, key: ChunkKey) -> Chunk | None:
        """As ``find``, and counted as a hit or a miss; a reader calls ``touch`` when it has all its keys."""
        chunk = self.find(key)
        if self.table.book is not None:
            self.table.book.asked(key, chunk)
        if chunk is None:
            self.counters.misses += 1
            return None
        self.counters.hit(chunk.size_bytes)
        self.hot.read(chunk)
        return chunk

    def touch(self, chunks: list[Chunk]) -> None:
        """One call read ``chunks``, in the order of its prompt."""
        self.room.end_batch()
        for chunk in chunks:
            self.room.touch(chunk)
        self.room.end_batch()

    def pin(self, chunk: Chunk, holder: Holder) -> Pinned:
        """A read lease on a LIVE chunk. Raises Overloaded if there are too many leases."""
        lease_id, copies_only = self._grant(chunk, holder, Opcode.READ)
        return Pinned(chunk, lease_id, copies_only)

    def unpin(self, lease_ids: Iterable[int], session_ids: Container[int]) -> None:
        """The holder will not touch these ranges any more, be they pinned or reserved.

        Leases that are over, or not of these sessions, are ignored.
        """
        for lease_id in lease_ids:
            lease = self.access.lease(LeaseId(lease_id))
            if lease is not None and lease.session_id in session_ids:
                self.freed(self.access.release(LeaseId(lease_id)))

    # --- the end of leases and chunks

    def freed(self, freed: Iterable[Freed]) -> None:
        """These leases are over (the access table's answer, or the segment server's word)."""
        for each in freed:
            chunk = self.table.unlease(each.lease_id)
            if chunk is None:
                continue
            if chunk.state is ChunkState.RESERVED:
                forsake(self, chunk)
            if chunk.state is ChunkState.CONDEMNED and chunk.num_leases == 0:
                self._free(chunk)

    def remove(self, key: ChunkKey) -> bool:
        """Drop the chunk by a client's wish, here and below; whether there was one."""
        holding = self.standing_anywhere(key)
        if holding is None:
            return False
        self.counters.removed += 1
        self.drop_both(key)
        self.announcements.remove(holding, deleted=True)
        return True

    def let_go(self, key: ChunkKey, version: int) -> None:
        """Another node has a copy now: drop the one here and below, unless it is pinned hard or another version."""
        holding = self.standing_anywhere(key)
        if holding is not None and holding.version == version and holding.pin is not Pin.HARD:
            self.drop_both(key)
            self.announcements.remove(holding)

    def drop_corrupt(self, chunk: Chunk) -> None:
        """Its bytes are not what its checksums say; a copy below stays."""
        self.counters.corrupt += 1
        self._left_memory(chunk, self.tier.find(chunk.key))
        self._drop(chunk)

    # --- the tier below

    def tier_lost(self, entry: TierEntry) -> None:
        """The tier below has let ``entry`` go."""
        if self.table.find(entry.key) is None:
            self.announcements.remove(entry)

    def session_exited(self, session_id: int) -> None:
        """The client's process has ended: all its leases are over."""
        self.desks.session_exited(session_id)
        self.freed(self.access.session_exited(session_id))

    def close_session(self, session_id: int) -> None:
        """The session's connections are gone; its leases end, mapped ones are kept until its process has exited."""
        self.desks.session_closed(session_id)
        self.freed(self.access.close_session(session_id))

    def expire(self, now_s: float) -> None:
        """End leases and chunks whose time has come."""
        self.freed(self.access.expire(now_s))
        self.tier.expire(now_s)
        for chunk in self.table.expired(now_s):
            self._end_of_time(chunk)

    # --- inside

    def standing(self, key: ChunkKey) -> Chunk | None:
        """The ANNOUNCING or LIVE chunk of ``key``; one whose time is over is dropped here."""
        chunk = self.table.find(key)
        if chunk is not None and self._is_over(chunk):
            self._end_of_time(chunk)
            return None
        return chunk

    def standing_anywhere(self, key: ChunkKey) -> Holding | None:
        """The same, or what is below."""
        return self.standing(key) or self.tier.find(key)

    def _end_of_time(self, chunk: Chunk) -> None:
        self.counters.expired += 1
        self.announcements.remove(chunk)
        self._drop(chunk)

    def _existed(self, chunk: Holding) -> Existed:
        self.counters.puts_existed += 1
        if isinstance(chunk, Chunk):
            self.room.touch(chunk)
        else:
            self.tier.touch(chunk)
        return Existed(chunk)

    def try_reserve(self, new: NewChunk, holder: Holder | None, *, sparing: bool) -> Reserved | None:
        """A range for ``new``, whatever stands and whoever waits; None if leases leave no room."""
        offset = take_range(self, new, sparing=sparing)
        if offset is None:
            return None
        now_s = self._clock.now_s()
        expires_s = None if new.ttl_s is None else now_s + new.ttl_s
        sums = compact(new.checksums)
        chunk = Chunk(new.key, new.version, offset, new.size_bytes, sums, new.pin, now_s, expires_s, new.replicas)
        self.table.enter(chunk)
        if holder is None:
            return Reserved(chunk, LeaseId(0))
        try:
            lease_id, copies_only = self._grant(chunk, holder, Opcode.WRITE)
        except (Overloaded, InvalidRequest):
            self.abandon(chunk)
            raise
        return Reserved(chunk, lease_id, copies_only)

    def _grant(self, chunk: Chunk, holder: Holder, mode: Opcode) -> tuple[LeaseId, bool]:
        lease_id, copies_only = grant(self.access, chunk.offset, chunk.size_bytes, holder, mode)
        self.table.lease(lease_id, chunk)
        return lease_id, copies_only

    def _go_live(self, chunk: Chunk, event: ChunkEvent) -> None:
        was_live = chunk.state is ChunkState.LIVE
        self.table.go_live(chunk, event)
        if not was_live:
            self.room.settle(chunk)

    def _is_over(self, chunk: Chunk) -> bool:
        return chunk.expires_s is not None and chunk.expires_s <= self._clock.now_s()

    def evict(self, chunk: Chunk, reason: EvictionReason = EvictionReason.ROOM) -> None:
        """Let a LIVE chunk go from memory; its range is free when nobody reads it."""
        self.counters.evictions_by[reason] += 1
        self.counters.evicted_bytes += chunk.size_bytes
        self._left_memory(chunk, self.tier.demote(chunk, self.left_s(chunk)))
        self._drop(chunk, evicted=True)

    def _left_memory(self, chunk: Chunk, entry: TierEntry | None) -> None:
        """Tell the master that the node has no copy any more, or where it has one now."""
        if entry is None:
            self.announcements.remove(chunk)
        else:
            self.announcements.add(entry)

    def drop_both(self, key: ChunkKey) -> None:
        """Let go what is here and below of ``key``; what the master is told is the caller's business."""
        entry, chunk = self.tier.find(key), self.table.find(key)
        if entry is not None:
            self.tier.drop(entry)
        if chunk is not None:
            self._drop(chunk)

    def _drop(self, chunk: Chunk, *, evicted: bool = False) -> None:
        if chunk.state is ChunkState.LIVE:
            self.room.leave(chunk, evicted=evicted)
        self.table.condemn(chunk)
        if chunk.num_leases == 0:
            self._free(chunk)

    def _free(self, chunk: Chunk) -> None:
        self.table.forget(chunk)
        self.room.allocator.free(chunk.offset, chunk.size_bytes)

    def check(self) -> None:
        """Assert the invariants of all parts, and that they agree with each other."""
        self.table.check()
        self.room.check()
        self.access.check()
        self.announcements.check()
        self.hot.check()
        self.room.allocator.check_tiles([*((c.offset, c.size_bytes) for c in self.table), *self.desks.ranges()])
        for chunk in filter(None, map(self.table.find, self.table.keys())):
            assert (chunk in self.room) == (chunk.state is ChunkState.LIVE and chunk.pin is not Pin.HARD)

    def __repr__(self) -> str:
        return f"NodeState({len(self.table)} chunks, {self.used_bytes}/{self.capacity_bytes} B)"
