"""The decisions of a store node: what it holds, who may touch it, what goes when room is needed.

Pure: requests and times go in, outcomes come out; bytes, sockets and the master belong to the services and the
reporter. What the master has to be told collects in ``reports``. Not thread-safe: one event loop owns it.

Every put is a reservation that is filled and then committed. ``reserve`` gives the range, whoever writes it (the node,
a client under a lease, the socket of a streamed value); a write buffer is a range that was reserved in advance, and
what its client has written there comes in with ``drain_buffers``. ``commit`` makes a chunk of any of them,
``abort_reservation`` lets it go.

The file is long because its parts keep to themselves: every decision that needs two of them is made here.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence

from tanghulu.auth.tenants import tenant_of
from tanghulu.errors import ChunkNotFound, InvalidRequest, LeaseExpired, Overloaded, StoreFull, TanghuluError
from tanghulu.eviction.base import Policy
from tanghulu.runtime.clock import Clock
from tanghulu.store.node.state.allocator import OffsetAllocator
from tanghulu.store.node.state.chunk import Chunk, ChunkEvent, ChunkState, compact
from tanghulu.store.node.state.chunk_table import ChunkMover, ChunkTable, Published
from tanghulu.store.node.state.counters import EvictionReason, HotKeys, NodeCounters
from tanghulu.store.node.state.holdings import Holding, LowerTier, NoTier
from tanghulu.store.node.state.limits import HardPins, no_room, refuse_impossible, refuse_while
from tanghulu.store.node.state.outcomes import (
    CommittedBy,
    Existed,
    Holder,
    Outcome,
    Pinned,
    Reserved,
    Waiter,
    WaitQueue,
)
from tanghulu.store.node.state.report_queue import ReportQueue
from tanghulu.store.node.state.space import STEP_RESIDENTS, Space
from tanghulu.store.node.state.ssd_chunk import SsdChunk
from tanghulu.store.node.state.tenant_usage import TenantUsage
from tanghulu.store.node.state.write_buffers import WriteBuffers
from tanghulu.store.protocol.checksums import Checksums, validate
from tanghulu.store.protocol.terms import NO_TERM, Term, TermFence
from tanghulu.store.protocol.types import RELIED_S, NewChunk, Pin
from tanghulu.store.protocol.write_buffer import BufferPlace
from tanghulu.transfer_engine.core.access import AccessTable
from tanghulu.transfer_engine.core.leases import Freed
from tanghulu.transfer_engine.core.slices import Opcode
from tanghulu.types import ChunkKey, LeaseId

#: Chunks that one tick evicts ahead of need, for the sake of a quota, or because their time is over: some 10 ms.
MAX_AHEAD = 512


class NodeState:
    """See the module; ``make_node_state`` builds one with its parts.

    ``lease_ms`` of ``access`` bounds reservations and pins of peers that get copies. ``generation`` is that of the
    node's process, ``max_value_bytes`` the largest value that is taken.
    """

    def __init__(
        self,
        table: ChunkTable,
        space: Space[Chunk],
        reports: ReportQueue,
        buffers: WriteBuffers,
        tier: LowerTier,
        tenants: TenantUsage | None,
        *,
        access: AccessTable,
        clock: Clock,
        generation: int,
        max_value_bytes: int,
    ) -> None:
        self.table = table
        self.space = space
        self.reports = reports
        self.buffers = buffers
        self.tier = tier
        self.tenants = tenants
        self._hard_pins = HardPins(space.allocator.capacity_bytes, tenants)
        self.access = access
        self.waiters = WaitQueue()
        self.counters, self.hot = NodeCounters(), HotKeys()
        self.draining = False
        self.fence = TermFence()
        self._exceeds_quota = False  # the last range that was asked for has to wait for more evictions by its quota
        self._clock = clock
        self._generation = generation
        self._max_value_bytes = max_value_bytes

    @property
    def capacity_bytes(self) -> int:
        """What the segment can hold."""
        return self.space.allocator.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the segment that are not free, reservations and condemned chunks included."""
        return self.space.allocator.used_bytes

    @property
    def num_chunks(self) -> int:
        """Chunks in memory that have their keys."""
        return len(self.table)

    # --- puts: reserve

    def reserve(self, new: NewChunk, holder: Holder | None) -> Outcome:
        """A range for ``new`` (RESERVED under a write lease), or that the key is there, or a place in the queue.

        Raises InvalidRequest for a value that can never fit, StoreFull if hard pins are used up, Overloaded if too many
        wait or the holder has too many leases.
        """
        return self.reserve_at_once(new, holder) or self.wait_for_room(new, holder)

    def reserve_at_once(self, new: NewChunk, holder: Holder | None) -> Reserved | Existed | None:
        """As ``reserve``, but None instead of a place in the queue."""
        return self._admit(new, holder, may_pass=not len(self.waiters))

    def wait_for_room(self, new: NewChunk, holder: Holder | None) -> Waiter:
        """A place in the queue; raises Overloaded if too many wait."""
        waiter = Waiter(new, holder)
        self.waiters.join(waiter)
        self.counters.lease_waits += 1
        return waiter

    def admit_waiters(self) -> list[tuple[Waiter, Reserved | Existed | TanghuluError]]:
        """Serve the queue as far as there is room now; to be called after anything was freed or became evictable."""
        served: list[tuple[Waiter, Reserved | Existed | TanghuluError]] = []
        while self.waiters.is_due:
            waiter = self.waiters.first()
            outcome: Reserved | Existed | TanghuluError | None
            try:
                outcome = self._admit(waiter.new, waiter.holder, may_pass=True)
            except TanghuluError as error:  # its session is gone, hard pins are used up meanwhile, the node drains
                outcome = error
            if outcome is None:
                if not self.has_more_to_do:
                    self.waiters.tried_in_vain()
                break
            self.stop_waiting(waiter)
            served.append((waiter, outcome))
        return served

    @property
    def has_more_to_do(self) -> bool:
        """Whether ``admit_waiters`` should be called again at once: room is made in steps."""
        return self.waiters.is_due and (self._exceeds_quota or self.space.has_more_to_do)

    def _admit(self, new: NewChunk, holder: Holder | None, *, may_pass: bool) -> Reserved | Existed | None:
        refuse_impossible(new, self._max_value_bytes)
        if new.pin is Pin.HARD and (refusal := self._refuse_hard_pin(new.key, new.size_bytes)) is not None:
            raise refusal
        if (existing := self.current_anywhere(new.key)) is not None:
            return self._existed(existing)
        refuse_while(self.draining)
        return self._try_reserve(new, holder) if may_pass else None

    def _refuse_hard_pin(self, key: ChunkKey, size_bytes: int) -> StoreFull | None:
        return self._hard_pins.refusal(key, size_bytes, self.table.hard_pinned_bytes)

    def stop_waiting(self, waiter: Waiter) -> None:
        """Take ``waiter`` out of the queue, if it is there."""
        self.waiters.leave(waiter)
        if not len(self.waiters):
            self.space.stop_vacating()

    def give_up_waiting(self, waiter: Waiter) -> StoreFull:
        """The put's deadline came first; the error to answer it with."""
        self.stop_waiting(waiter)
        self.counters.store_full += 1
        return no_room(waiter.new, self.capacity_bytes)

    def take_back(self, reserved: Reserved) -> None:
        """Let go a reservation that nobody has heard of yet."""
        if reserved.lease_id:
            self.freed(self.access.release(reserved.lease_id))
        else:
            self.abort_reservation(reserved.chunk)

    def _try_reserve(self, new: NewChunk, holder: Holder | None) -> Reserved | None:
        """A range for ``new``, even if its key has a chunk or other puts wait; None if there is no room yet."""
        offset = self._take_range(new)
        if offset is None:
            return None
        now_s = self._clock.now_s()
        expires_s = None if new.ttl_s is None else now_s + new.ttl_s
        sums = compact(new.checksums)
        size, replicas = new.size_bytes, new.replicas
        chunk = Chunk.reserved(
            new.key, new.version, offset, size, sums, new.pin, now_s, expires_s=expires_s, replicas=replicas
        )
        self._enter(chunk)
        if holder is None:
            return Reserved(chunk, LeaseId(0))
        try:
            lease_id, copies_only = self._grant(chunk, holder, Opcode.WRITE)
        except (Overloaded, InvalidRequest):
            self.abort_reservation(chunk)
            raise
        return Reserved(chunk, lease_id, copies_only)

    def _take_range(self, new: NewChunk) -> int | None:
        """A range for ``new`` within its tenant's quota; None if there is none yet, see Space.take.

        Raises InvalidRequest for a value above the quota, QuotaExceeded if what the tenant holds cannot be evicted now.
        """
        tenants = self.tenants
        self._exceeds_quota = False
        if tenants is not None and (excess_bytes := tenants.excess_bytes(new)):
            tenant = tenant_of(new.key)
            chosen, missing_bytes = self.space.oldest_of(tenant, excess_bytes)
            if missing_bytes > 0:
                raise tenants.no_room(tenant)
            self._exceeds_quota = len(chosen) > STEP_RESIDENTS
            for chunk in chosen[:STEP_RESIDENTS]:
                self.evict(chunk, EvictionReason.QUOTA)
            if self._exceeds_quota:
                return None
        return self.space.take(new.size_bytes, self.evict)

    # --- puts: commit or abort

    def end_writing(self, lease_id: LeaseId, session_id: int) -> Chunk:
        """The holder has written this reservation, which has no lease now. Raises LeaseExpired, and it is gone."""
        chunk = self.table.leased(lease_id)
        lease = self.access.lease(lease_id)
        if chunk is None or lease is None or lease.session_id != session_id or chunk.state is not ChunkState.RESERVED:
            raise LeaseExpired(f"reservation {lease_id} has ended; reserve again")
        active = self.access.is_active(lease_id)
        freed = self.access.release(lease_id)
        if not active or not freed:
            self.abort_reservation(chunk)
            self.freed(freed)
            raise LeaseExpired(f"reservation {lease_id} of {chunk.key!r} has ended, or is still written; reserve again")
        self.table.unlease(lease_id)
        return chunk

    def obeys(self, term: int, term_of: int) -> bool:
        """Whether to obey the master that answered so; clients learn the newest term by the index."""
        newest = self.fence.newest
        admitted = self.fence.admits(term, term_of)
        if self.fence.newest != newest:
            self.table.tell_term(self.fence.newest)
        return admitted

    def is_commit_valid(self, chunk: Chunk, generation: int, term: Term = NO_TERM) -> bool:
        """Whether a client's commit of this reservation at the master, for that generation of the node, still holds.

        Not when it may have been made too long ago, nor at a master whose ``term`` is over, nor when an earlier try of
        the put was retracted: the retraction may reach the master behind the commit.
        """
        if generation != self._generation or self.age_s(chunk) > RELIED_S or self.fence.is_over(*term):
            return False
        return not self.reports.has_retracted(chunk.key, chunk.version)

    def commit(self, chunk: Chunk, checksums: Checksums, by: CommittedBy) -> Reserved | Existed:
        """The bytes of a reservation are in place and nobody writes any more; asserts that it has no lease.

        The value is dropped if the key has a chunk already, and if the checksums cannot be its own (InvalidRequest).
        A client's commit supersedes a chunk of another version that the master has not confirmed; any other current
        chunk means that the master has changed its mind.
        """
        assert chunk.num_leases == 0, f"{chunk.key!r} is still leased"
        by_client = by is CommittedBy.CLIENT
        current = self.current_anywhere(chunk.key)
        if by_client and current is not None and current.version != chunk.version and self.reports.is_pending(current):
            self._supersede(current)
            current = None
        if current is not None:
            self.abort_reservation(chunk)
            outcome: Reserved | Existed = self._existed(current)
        else:
            self._publish(chunk, checksums, by)
            outcome = Reserved(chunk, LeaseId(0))
        if by_client:
            self.space.end_batch()  # each put is a call of its own
        return outcome

    def _publish(self, chunk: Chunk, checksums: Checksums, by: CommittedBy) -> None:
        try:
            validate(checksums, chunk.size_bytes)
        except InvalidRequest:
            self.abort_reservation(chunk)
            raise
        chunk.compact_checksums = compact(checksums)
        self.table.publish(chunk, ChunkEvent.COMMIT if by is CommittedBy.NODE else ChunkEvent.COMMIT_UNSEEN)
        if chunk.state is ChunkState.LIVE:
            self._settle(chunk)
        by_client = by is CommittedBy.CLIENT
        self.reports.add(chunk, patient=by_client, unconfirmed=not by_client)
        self.counters.puts += 1

    def _supersede(self, chunk: Holding) -> None:
        """Drop ``chunk``, because the master has chosen another put of its key; putters that wait for it hear so."""
        self.reports.forget(chunk)
        self.drop_both(chunk.key)
        self.reports.settle(chunk, stands=False)

    def abort_reservation(self, chunk: Chunk) -> None:
        """Let go a reservation whose put failed; its range is free when it has no lease.

        What its client may have told the master of it is retracted, unless the same put has its chunk here.
        """
        self.table.condemn(chunk)
        current = self.table.find(chunk.key) or self.tier.find(chunk.key)
        if current is None or current.version != chunk.version:
            self.reports.retract(chunk.key, chunk.version)
        if chunk.num_leases == 0:
            self._free(chunk)

    # --- write buffers

    def grant_buffer(self, session_id: int, value_bytes: int, key_scope: str = "") -> BufferPlace | None:
        """A write buffer for values of about that size; None: no memory to spare, or somebody waits for it.

        ``key_scope`` stands in front of all keys that its client writes: its tenant's.
        """
        self.tick_buffers(self._clock.now_s())  # the session's last one may be left
        if self.draining or len(self.waiters):
            return None
        if self.tenants is not None and self.tenants.limit_of(tenant_of(key_scope)):
            return None  # what the client writes there would count only when it is there
        wanted = self.buffers.wanted(session_id, value_bytes)
        if wanted is None:
            return None
        taken = self.space.carve(
            *wanted,
            self.tier.free_queue_bytes,  # beyond it chunks would be dropped; watermarks make room at the disk's pace
            lambda chunk: self.evict(chunk, EvictionReason.WRITE_BUFFER),
        )
        return None if taken is None else self.buffers.open(session_id, *taken, key_scope)

    def drain_buffers(self) -> int:
        """Make chunks of what clients have written into their buffers; returns how many."""
        return self._adopt(self.buffers.drain())

    def tick_buffers(self, now_s: float) -> int:
        """The same, and take back what clients do not use: all of it while the node drains or a put waits for room."""
        used_bytes = self.used_bytes
        chunks = self.buffers.tick(now_s, unwanted=self.draining or len(self.waiters) > 0)
        self.waiters.freed(used_bytes - self.used_bytes)
        return self._adopt(chunks)

    def _adopt(self, chunks: Sequence[Chunk]) -> int:
        for chunk in chunks:
            self._enter(chunk)
            self.commit(chunk, chunk.checksums, CommittedBy.CLIENT)
        return len(chunks)

    # --- what the master said

    def reported(self, chunk: Holding, *, accepted: bool) -> None:
        """The master has taken note of ``chunk``, or knows an older put of its key."""
        if chunk.held:  # else it was dropped meanwhile, and the master is being told
            if not accepted:
                self.counters.refused += 1
                self.reports.forget(chunk)
                self.drop_both(chunk.key)
            else:
                self.reports.accepted(chunk)
                if isinstance(chunk, Chunk):
                    self._go_live(chunk, ChunkEvent.ACCEPTED)
        self.reports.settle(chunk, accepted)

    def gave_up(self, chunk: Holding) -> None:
        """Nobody waits for the master's answer any more: the chunk is served to those who ask here."""
        if isinstance(chunk, Chunk) and chunk.state is ChunkState.ANNOUNCING:
            self._go_live(chunk, ChunkEvent.GAVE_UP)

    def report_all(self) -> None:
        """Tell the master everything that the node holds, each key once; the next messages carry it, as it allows."""
        self.drain_buffers()
        self.reports.begin_report([*self.table, *self.tier.entries()], self._is_reported)

    def _is_reported(self, holding: Holding) -> bool:
        if isinstance(holding, Chunk):
            return holding.state is ChunkState.LIVE
        return holding.held and self.table.find(holding.key) is None

    def live_chunks(self) -> list[Holding]:
        """Everything that a full report lists."""
        self.drain_buffers()
        below = [entry for entry in self.tier.entries() if self.table.find(entry.key) is None]
        return [*(c for c in self.table if c.state is ChunkState.LIVE), *below]

    @property
    def has_writers(self) -> bool:
        """Whether a reservation or a write buffer may bring a chunk yet."""
        return self.table.writing or self.buffers.num_open > 0

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

    def find_below(self, key: ChunkKey) -> SsdChunk | None:
        """The chunk of ``key`` in the tier below."""
        return self.tier.find(key)

    def holds(self, key: ChunkKey) -> bool:
        """Whether a get would find ``key`` here, in memory or below."""
        return self.find(key) is not None or self.tier.find(key) is not None

    def all_keys(self) -> list[ChunkKey]:
        """All keys of ANNOUNCING and LIVE chunks in memory, and of chunks below; some twice."""
        return [*self.table.keys(), *(entry.key for entry in self.tier.entries())]

    def look_up(self, key: ChunkKey) -> Chunk | None:
        """As ``find``, and counted as a hit or a miss; a reader calls ``touch`` when it has all its keys."""
        chunk = self.find(key)
        if self.tenants is not None:
            self.tenants.asked(key, chunk)
        if chunk is None:
            self.counters.misses += 1
            return None
        self.counters.hit(chunk.size_bytes)
        self.hot.read(chunk)
        return chunk

    def touch(self, chunks: list[Chunk]) -> None:
        """One call read ``chunks``, in the order of its prompt."""
        self.space.end_batch()
        for chunk in chunks:
            self.space.touch(chunk)
        self.space.end_batch()

    def current(self, key: ChunkKey) -> Chunk | None:
        """The ANNOUNCING or LIVE chunk of ``key``; one whose time is over is dropped here."""
        chunk = self.table.find(key)
        if chunk is not None and self._is_over(chunk):
            self._end_of_time(chunk)
            return None
        return chunk

    def current_anywhere(self, key: ChunkKey) -> Holding | None:
        """The same, or what is below."""
        return self.current(key) or self.tier.find(key)

    def _existed(self, chunk: Holding) -> Existed:
        self.counters.puts_existed += 1
        if isinstance(chunk, Chunk):
            self.space.touch(chunk)
        else:
            self.tier.touch(chunk)
        return Existed(chunk)

    def drain(self, draining: bool) -> None:
        """Take no new chunks from now on, or take them again."""
        self.draining = draining
        self.waiters.recheck()

    # --- sessions and leases

    def open_session(self, session_id: int, pid: int | None, *, may_write: bool = True) -> None:
        """A client has come; ``pid`` of its process if the kernel says so."""
        self.access.open_session(session_id, pid, may_write=may_write)

    def depends_on(self, session_id: int) -> bool:
        """Whether something still depends on the end of the session's process."""
        return self.access.has_session(session_id) or self.buffers.knows(session_id)

    def close_session(self, session_id: int) -> None:
        """The session's connections are gone; its leases end, mapped ones are kept until its process has exited."""
        self._adopt(self.buffers.session_closed(session_id))
        self.freed(self.access.close_session(session_id))
        self.waiters.recheck()

    def session_exited(self, session_id: int) -> None:
        """The client's process has ended: all its leases are over."""
        self._adopt(self.buffers.session_exited(session_id))
        self.freed(self.access.session_exited(session_id))
        self.waiters.recheck()

    def leased(self, lease_id: int) -> Chunk | None:
        """The chunk or reservation that ``lease_id`` stands on."""
        return self.table.leased(LeaseId(lease_id))

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

    def release_unheld(self, session_ids: Container[int], held: Container[int]) -> None:
        """A client that came back holds no lease of its lost sessions but ``held``."""
        self.unpin([lease_id for lease_id, _ in self.table.leases() if lease_id not in held], session_ids)

    def freed(self, freed: Iterable[Freed]) -> None:
        """These leases are over (the access table's answer, or the segment server's word)."""
        for each in freed:
            chunk = self.table.unlease(each.lease_id)
            if chunk is None:
                continue
            if chunk.state is ChunkState.RESERVED:
                self.abort_reservation(chunk)
            elif chunk.num_leases:
                continue
            elif chunk.state is ChunkState.CONDEMNED:
                self._free(chunk)
            elif chunk.is_live:
                self.space.refresh(chunk)
                self.waiters.freed(chunk.size_bytes)

    def _grant(self, chunk: Chunk, holder: Holder, mode: Opcode) -> tuple[LeaseId, bool]:
        """(a lease on the chunk's range, whether it is for copies only), by the holder's mapping if it may."""
        lease_id, copies_only = None, True
        if holder.maps:
            try:
                lease_id = self.access.grant(holder.session_id, chunk.offset, chunk.size_bytes, mode, shm=True)
                copies_only = False
            except Overloaded:
                pass  # it maps too much already: copies are served
        if lease_id is None:
            lease_id = self.access.grant(holder.session_id, chunk.offset, chunk.size_bytes, mode)
        self.table.lease(lease_id, chunk)
        if chunk.is_live:
            self.space.refresh(chunk)
        return lease_id, copies_only

    # --- the end of chunks

    def remove(self, key: ChunkKey) -> bool:
        """Drop the chunk on a client's order, here and below; whether there was one."""
        holding = self.current_anywhere(key)
        if holding is None:
            return False
        self.counters.removed += 1
        self.drop_both(key)
        self.reports.remove(holding, deleted=True)
        return True

    def let_go(self, key: ChunkKey, version: int) -> None:
        """Another node has a copy now: drop the one here and below, unless it is pinned hard or another version."""
        holding = self.current_anywhere(key)
        if holding is not None and holding.version == version and holding.pin is not Pin.HARD:
            self.drop_both(key)
            self.reports.remove(holding)

    def drop_corrupt(self, chunk: Chunk) -> None:
        """Its bytes are not what its checksums say; a copy below stays."""
        self.counters.corrupt += 1
        self._left_memory(chunk, self.tier.find(chunk.key))
        self._drop(chunk)

    def drop_both(self, key: ChunkKey) -> None:
        """Let go what is here and below of ``key``; what the master is told is the caller's business."""
        entry, chunk = self.tier.find(key), self.table.find(key)
        if entry is not None:
            self.tier.drop(entry)
        if chunk is not None:
            self._drop(chunk)

    def expire(self, now_s: float) -> None:
        """End leases and chunks whose time has come; to be called at every tick."""
        self.waiters.tick()
        self.counters.largest_free_bytes = self.space.allocator.largest_free_bytes
        self.freed(self.access.expire(now_s))
        self.tier.expire(now_s)
        for chunk in self.table.expired(now_s, MAX_AHEAD):
            self._end_of_time(chunk)

    def _end_of_time(self, chunk: Chunk) -> None:
        self.counters.expired += 1
        self.reports.remove(chunk)
        self._drop(chunk)

    def _is_over(self, chunk: Chunk) -> bool:
        return chunk.expires_s is not None and chunk.expires_s <= self._clock.now_s()

    # --- eviction

    def evict(self, chunk: Chunk, reason: EvictionReason = EvictionReason.ROOM) -> None:
        """Let a LIVE chunk go from memory; its range is free when nobody reads it."""
        self.counters.evicted(chunk.size_bytes, reason)
        self._left_memory(chunk, self.tier.demote(chunk, self.left_s(chunk)))
        self._drop(chunk, evicted=True)

    def evict_ahead(self, num_bytes: int) -> None:
        """Evict the first to go before a put needs their room: what holds ``num_bytes``, or as many as a tick may."""
        for chunk in self.space.oldest(num_bytes, MAX_AHEAD):
            self.evict(chunk, EvictionReason.WATERMARK)

    def evict_oldest(self, num_bytes: int, reason: EvictionReason) -> list[Chunk]:
        """Evict the first to go, as many as hold ``num_bytes``, and say which."""
        chosen = self.space.oldest(num_bytes)
        for chunk in chosen:
            self.evict(chunk, reason)
        return chosen

    def trim_tenants(self) -> None:
        """Evict what tenants hold too much because they hold more on other nodes; to be called now and then."""
        for tenant, excess_bytes in () if self.tenants is None else self.tenants.overdrawn():
            for chunk in self.space.oldest_of(tenant, excess_bytes)[0][:MAX_AHEAD]:
                self.evict(chunk, EvictionReason.QUOTA)

    def victims(self) -> list[Chunk]:
        """Everything that could be evicted now, the first to go first."""
        return list(self.space.victims())

    def warmest(self) -> list[Chunk]:
        """Everything that could be kept for the node's next start: what is pinned hard, then the last to be evicted."""
        pinned = [chunk for chunk in self.table if chunk.is_live and chunk.pin is Pin.HARD]
        return [*pinned, *reversed(self.victims())]

    @property
    def eviction_policy(self) -> str:
        """The policy that orders the evictions from memory."""
        return self.space.policy_name

    def switch_policies(self, memory: Callable[[], Policy], tier: Callable[[], Policy]) -> None:
        """Let other policies order the evictions from memory and from the tier below."""
        self.space.switch_policy(memory)
        self.tier.switch_policy(tier)

    def _left_memory(self, chunk: Chunk, entry: SsdChunk | None) -> None:
        """Tell the master that the node has no copy any more, or where it has one now."""
        if entry is None:
            self.reports.remove(chunk)
        else:
            self.reports.add(entry)

    # --- promotion from the tier below

    @property
    def promotion_has_more_to_do(self) -> bool:
        """Whether ``reserve_promotion`` should be called again at once: room is made in steps."""
        return self._exceeds_quota or self.space.has_more_to_do

    def reserve_promotion(self, entry: SsdChunk) -> Chunk | None:
        """A range for ``entry``; None if there is no room yet.

        What is pinned hard beyond the limit (memory became smaller, or others were pinned meanwhile) is pinned softly
        here; below it stays as it is.
        """
        left_s, pin = self.left_s(entry), entry.pin
        if pin is Pin.HARD and self._refuse_hard_pin(entry.key, entry.size_bytes) is not None:
            pin = Pin.SOFT
        new = NewChunk(entry.key, entry.version, entry.size_bytes, entry.checksums, pin, left_s, entry.replicas)
        reserved = self._try_reserve(new, None)
        return None if reserved is None else reserved.chunk

    def promote(self, chunk: Chunk, entry: SsdChunk) -> Chunk:
        """The bytes of ``entry`` are in place; the chunk that serves its key now. Raises ChunkNotFound if it is gone.

        What was removed while it was read does not come back.
        """
        existing = self.current(chunk.key)
        if existing is not None or not entry.held:
            self.abort_reservation(chunk)
            if existing is None:
                raise ChunkNotFound(f"{chunk.key!r} was dropped on its way up")
            return existing
        self.table.publish(chunk, ChunkEvent.COMMIT_UNSEEN)
        self._settle(chunk)
        self.space.end_batch()
        self.reports.add(chunk)
        return chunk

    # --- inside

    def _go_live(self, chunk: Chunk, event: ChunkEvent) -> None:
        was_live = chunk.state is ChunkState.LIVE
        self.table.go_live(chunk, event)
        if not was_live:
            self._settle(chunk)

    def _settle(self, chunk: Chunk) -> None:
        self.space.settle(chunk)
        self.waiters.freed(chunk.size_bytes)

    def _enter(self, chunk: Chunk) -> None:
        self.table.enter(chunk)
        if self.tenants is not None:
            self.tenants.entered(chunk)

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
        self.waiters.freed(chunk.size_bytes)

    def end_call(self) -> None:
        """A client's call has been served: its chunks enter the order of evictions, and the index that clients read."""
        self.space.end_batch()
        self.table.flush()

    def check(self) -> None:
        """Assert the invariants of all parts, and that they agree with each other."""
        self.table.check()
        self.space.check()
        self.access.check()
        self.reports.check()
        self.hot.check()
        self.buffers.check()
        if self.tenants is not None:
            self.tenants.check(self.table)
        chunks = ((c.offset, c.size_bytes) for c in self.table)
        self.space.allocator.check_tiles([*chunks, *self.buffers.ranges(), *self.space.in_between])
        for chunk in filter(None, map(self.table.find, self.table.keys())):
            assert (chunk in self.space) == (chunk.state is ChunkState.LIVE and chunk.pin is not Pin.HARD)

    def __repr__(self) -> str:
        return f"NodeState({len(self.table)} chunks, {self.used_bytes}/{self.capacity_bytes} B)"


def make_node_state(
    capacity_bytes: int,
    access: AccessTable,
    make_policy: Callable[[], Policy],
    clock: Clock,
    *,
    generation: int = 0,
    max_value_bytes: int = 0,
    published: Published | None = None,
    tenants: TenantUsage | None = None,
    buffer_memory: tuple[memoryview, int | None] = (memoryview(b""), None),
    make_tier: Callable[[Callable[[SsdChunk], None]], LowerTier] | None = None,
) -> NodeState:
    """A node's decisions over ``capacity_bytes`` of memory, with its parts wired together.

    ``max_value_bytes`` 0: what fits into the memory. ``buffer_memory``: the memory, and where it has AREA_BYTES for the
    heads and records of write buffers; without it there are none. ``make_tier`` is given a function that the tier calls
    for every chunk that it has let go.
    """
    allocator = OffsetAllocator(capacity_bytes)
    table, reports = ChunkTable(published), ReportQueue()
    memory, area = buffer_memory
    buffers = WriteBuffers(allocator, clock, memory, area)

    def lost_below(entry: SsdChunk) -> None:
        if table.find(entry.key) is None:
            reports.remove(entry)

    return NodeState(
        table,
        Space(allocator, table, make_policy, ChunkMover(table, memory if len(memory) else None)),
        reports,
        buffers,
        NoTier() if make_tier is None else make_tier(lost_below),
        tenants,
        access=access,
        clock=clock,
        generation=generation,
        max_value_bytes=max_value_bytes or capacity_bytes,
    )
