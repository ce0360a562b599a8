"""The decisions of a store node: puts, promotions, write buffers, sessions, and the masters' answers on its chunks.

Pure: requests and times go in, outcomes come out; bytes, sockets and the master belong to the services and the
reporter. Changes not yet known to the masters collect in ``reports``. Not thread-safe: one event loop owns it.

Every put is a reservation that is filled and then committed. ``reserve`` returns the range, for any writer (the node, a
client under a lease, the socket of a streamed value); a write buffer is a range reserved in advance, and values written
there by its client arrive with ``drain_buffers``. ``commit`` makes a chunk of any of them,
``NodeChunks.abort_reservation`` drops it.

The chunks, in memory and below, are in ``NodeChunks``; access to them is in ``ChunkLeases``. This module has what needs
both, and waiting puts, write buffers and the master's decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tanghulu.errors import ChunkNotFound, InvalidRequest, Overloaded, StoreFull, TanghuluError
from tanghulu.eviction.base import Policy
from tanghulu.runtime.clock import Clock
from tanghulu.store.node.space.allocator import OffsetAllocator, OnTaken, ignore_taken
from tanghulu.store.node.space.space import Space
from tanghulu.store.node.state.chunk import Chunk, ChunkEvent, ChunkState, compact
from tanghulu.store.node.state.chunk_leases import ChunkLeases
from tanghulu.store.node.state.chunk_table import ChunkTable, Published
from tanghulu.store.node.state.holdings import Holding, LowerTier, NoTier
from tanghulu.store.node.state.limits import no_room, refuse_impossible, refuse_while
from tanghulu.store.node.state.node_chunks import NodeChunks
from tanghulu.store.node.state.outbox import MasterOutbox, ReportMessage
from tanghulu.store.node.state.outcomes import (
    CommittedBy,
    Existed,
    Holder,
    Reserved,
    Waiter,
    WaitQueue,
)
from tanghulu.store.node.state.reports import NodeReports
from tanghulu.store.node.state.ssd_chunk import SsdChunk
from tanghulu.store.node.state.tenant_usage import TenantUsage
from tanghulu.store.node.state.write_buffers import WriteBuffers
from tanghulu.store.protocol.checksums import Checksums, validate
from tanghulu.store.protocol.range_map import RangeMap
from tanghulu.store.protocol.terms import NO_TERM, Term, TermFence
from tanghulu.store.protocol.types import RELIED_S, NewChunk, Pin
from tanghulu.store.protocol.write_buffer import BufferPlace
from tanghulu.transfer_engine.core.access import AccessTable
from tanghulu.transfer_engine.core.slices import Opcode
from tanghulu.types import LeaseId


class NodeState:
    """See the module; ``make_node_state`` builds one with its parts.

    ``lease_ms`` of ``access`` bounds reservations and pins of peers that get copies. ``generation`` is that of the
    node's process, ``max_value_bytes`` the largest accepted value.
    """

    def __init__(
        self,
        chunks: NodeChunks,
        leases: ChunkLeases,
        reports: NodeReports,
        buffers: WriteBuffers,
        waiters: WaitQueue,
        published: Published,
        *,
        clock: Clock,
        generation: int,
        max_value_bytes: int,
    ) -> None:
        self.chunks = chunks
        self.leases = leases
        self.reports = reports
        self.buffers = buffers
        self.waiters = waiters
        self.counters = chunks.counters
        self.draining = False
        self._fence = TermFence()
        self._published = published
        self._clock = clock
        self._generation = generation
        self._max_value_bytes = max_value_bytes

    # --- puts: reserve

    def reserve(self, new: NewChunk, holder: Holder | None) -> Reserved | Existed | None:
        """Return a range for ``new`` (RESERVED under a write lease), or that its key exists; None: it has to wait.

        Raises InvalidRequest for a value that can never fit, StoreFull if hard pins are used up, Overloaded if the
        holder has too many leases.
        """
        return self._admit(new, holder, may_pass=not len(self.waiters))

    def wait_for_room(self, new: NewChunk, holder: Holder | None) -> Waiter:
        """Return a place in the queue; raises Overloaded if too many wait."""
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
        """Whether to call ``admit_waiters`` again at once, as room is made in steps."""
        return self.waiters.is_due and self.chunks.has_more_to_evict

    def _admit(self, new: NewChunk, holder: Holder | None, *, may_pass: bool) -> Reserved | Existed | None:
        refuse_impossible(new, self._max_value_bytes)
        if (existing := self.chunks.current_anywhere(new.key)) is not None:
            return self._existed(existing)
        if new.pin is Pin.HARD and (refusal := self.chunks.refuse_hard_pin(new.key, new.size_bytes)):
            raise refusal
        refuse_while(self.draining)
        return self._try_reserve(new, holder) if may_pass else None

    def _existed(self, holding: Holding) -> Existed:
        self.chunks.put_again(holding)
        return Existed(holding)

    def stop_waiting(self, waiter: Waiter) -> None:
        """Remove ``waiter`` from the queue, if it is there."""
        self.waiters.leave(waiter)
        if not len(self.waiters):
            self.chunks.stop_making_room()

    def give_up_waiting(self, waiter: Waiter) -> StoreFull:
        """Give up a put whose deadline has passed; return the error to answer it with."""
        self.stop_waiting(waiter)
        self.counters.store_full += 1
        return no_room(waiter.new, self.chunks.capacity_bytes)

    def take_back(self, reserved: Reserved) -> None:
        """Drop a reservation not yet reported to its client."""
        if reserved.lease_id:
            self.leases.release(reserved.lease_id)
        else:
            self.chunks.abort_reservation(reserved.chunk)

    def _try_reserve(self, new: NewChunk, holder: Holder | None) -> Reserved | None:
        """Return a range for ``new``, even if its key has a chunk or other puts wait; None if there is no room yet."""
        offset = self.chunks.take_range(new)
        if offset is None:
            return None
        now_s = self._clock.now_s()
        expires_s = None if new.ttl_s is None else now_s + new.ttl_s
        sums = compact(new.checksums)
        size, replicas = new.size_bytes, new.replicas
        chunk = Chunk.reserved(
            new.key, new.version, offset, size, sums, new.pin, now_s, expires_s=expires_s, replicas=replicas
        )
        self.chunks.enter(chunk)
        if holder is None:
            return Reserved(chunk, LeaseId(0))
        try:
            lease_id, copies_only = self.leases.grant(chunk, holder, Opcode.WRITE)
        except (Overloaded, InvalidRequest):
            self.chunks.abort_reservation(chunk)
            raise
        return Reserved(chunk, lease_id, copies_only)

    # --- puts: commit or abort

    def admits(self, term: Term) -> bool:
        """Return whether to obey the master of that answer; clients learn the newest term from the index."""
        newest = self._fence.newest
        admitted = self._fence.admits(term)
        if self._fence.newest != newest:
            self._published.publish_term(self._fence.newest)
        return admitted

    @property
    def newest_term(self) -> Term:
        """The newest term received from any master."""
        return self._fence.newest

    def take_map(self, known: RangeMap) -> None:
        """Use the map ``known`` from now on; clients learn from the index that a range may have another owner."""
        self._published.publish_term(Term(max(known.terms), known.cluster))
        self.reports.take_map(known)

    def is_commit_valid(self, chunk: Chunk, generation: int, term: Term = NO_TERM) -> bool:
        """Return whether a client's commit of this reservation at the master, for that node generation, still holds.

        It does not if it may have been made too long ago, nor at a master whose ``term`` has ended, nor if an earlier
        try of the put was retracted: the retraction may reach the master behind the commit.
        """
        if generation != self._generation or self.chunks.age_s(chunk) > RELIED_S:
            return False
        if self.reports.is_over(chunk.key, term) if self.reports.map is not None else self._fence.is_over(term):
            return False
        return not self.reports.has_retracted(chunk.key, chunk.version)

    def commit(self, chunk: Chunk, checksums: Checksums, by: CommittedBy) -> Reserved | Existed:
        """Commit a reservation whose bytes are in place and no longer written; asserts that it has no lease.

        The value is dropped if the key has a chunk already, and if the checksums cannot be its own (InvalidRequest). A
        client's commit supersedes a chunk of another version that the master has not confirmed; any other current chunk
        means that the master has changed its decision.
        """
        assert chunk.num_leases == 0, f"{chunk.key!r} is still leased"
        by_client = by is CommittedBy.CLIENT
        current = self.chunks.current_anywhere(chunk.key)
        if by_client and current is not None and current.version != chunk.version and self.reports.is_pending(current):
            self._supersede(current)
            current = None
        if current is not None:
            self.chunks.abort_reservation(chunk)
            outcome: Reserved | Existed = self._existed(current)
        else:
            self._publish(chunk, checksums, by)
            outcome = Reserved(chunk, LeaseId(0))
        if by_client:
            self.chunks.end_batch()  # each put is a call of its own
        return outcome

    def _publish(self, chunk: Chunk, checksums: Checksums, by: CommittedBy) -> None:
        try:
            validate(checksums, chunk.size_bytes)
        except InvalidRequest:
            self.chunks.abort_reservation(chunk)
            raise
        chunk.compact_checksums = compact(checksums)
        self.chunks.publish(chunk, ChunkEvent.COMMIT if by is CommittedBy.NODE else ChunkEvent.COMMIT_UNSEEN)
        by_client = by is CommittedBy.CLIENT
        self.reports.add(chunk, low_priority=by_client, unconfirmed=not by_client)
        self.counters.puts += 1

    def _supersede(self, chunk: Holding) -> None:
        """Drop ``chunk``, because the master has chosen another put of its key; its waiting putters are notified."""
        self.reports.forget(chunk)
        self.chunks.drop_both(chunk.key)
        self.reports.settle(chunk, stands=False)

    # --- write buffers

    def grant_buffer(
        self, session_id: int, value_bytes: int, key_scope: str = "", puts_kv: bool = True
    ) -> BufferPlace | None:
        """Grant a write buffer for values of about that size; None: no memory to spare, or puts wait for it.

        ``key_scope`` is the prefix of all keys written by its client: its tenant's; ``puts_kv``: KV is among them.
        """
        self.tick_buffers(self._clock.now_s())  # the session's last one may be left
        if self.draining or len(self.waiters):
            return None
        if self.chunks.has_quota(key_scope):
            return None  # the client's writes there would count only once it is there
        wanted = self.buffers.wanted(session_id, value_bytes)
        if wanted is None:
            return None
        taken = self.chunks.carve(*wanted)
        return None if taken is None else self.buffers.open(session_id, *taken, key_scope, puts_kv)

    def drain_buffers(self) -> int:
        """Make chunks of clients' writes in their buffers; return their number."""
        return self._adopt(self.buffers.drain())

    def tick_buffers(self, now_s: float) -> int:
        """Drain the buffers, and take back the unused ones; all while the node drains or a put waits for room."""
        used_bytes = self.chunks.used_bytes
        chunks = self.buffers.tick(now_s, unwanted=self.draining or len(self.waiters) > 0)
        self.waiters.freed(used_bytes - self.chunks.used_bytes)
        return self._adopt(chunks)

    def _adopt(self, chunks: Sequence[Chunk]) -> int:
        for chunk in chunks:
            self.chunks.enter(chunk)
            self.commit(chunk, chunk.checksums, CommittedBy.CLIENT)
        return len(chunks)

    # --- decisions of the masters

    def reported(self, chunk: Holding, *, accepted: bool) -> None:
        """Take the master's decision: it has accepted ``chunk``, or knows an older put of its key."""
        if chunk.held:  # otherwise it was dropped meanwhile, and the master is being notified
            if not accepted:
                self.counters.refused += 1
                self.reports.forget(chunk)
                self.chunks.drop_both(chunk.key)
            else:
                self.reports.confirmed(chunk)
                if isinstance(chunk, Chunk):
                    self.chunks.go_live(chunk, ChunkEvent.ACCEPTED)
        self.reports.settle(chunk, accepted)

    def gave_up(self, chunk: Holding) -> None:
        """Serve a chunk whose putter no longer waits for the master's answer."""
        if isinstance(chunk, Chunk) and chunk.state is ChunkState.ANNOUNCING:
            self.chunks.go_live(chunk, ChunkEvent.GAVE_UP)

    # --- messages to the masters

    def next_message(self, outbox: MasterOutbox) -> ReportMessage:
        """Return the next message of ``outbox``, with all earlier writes of clients."""
        self.drain_buffers()
        return outbox.take()

    def report_all(self) -> None:
        """Report all chunks to the masters, each key once; the next messages carry them, as granted by the masters."""
        self.reports.want_reports()
        self.begin_reports()

    def begin_reports(self) -> None:
        """Begin the reports requested by masters, if any: of ranges that they have come to own, or of everything."""
        if self.reports.report_wanted:
            self.drain_buffers()
            self.chunks.begin_reports()

    @property
    def has_writers(self) -> bool:
        """Whether a reservation or a write buffer may still bring a chunk."""
        return self.chunks.writing or self.buffers.num_open > 0

    def expire(self, now_s: float) -> None:
        """End expired leases and chunks; to be called at every tick."""
        self.waiters.tick()
        self.leases.expire(now_s)
        self.chunks.expire(now_s)

    def drain(self, draining: bool) -> None:
        """Refuse new chunks from now on, or accept them again."""
        self.draining = draining
        self.waiters.recheck()

    # --- sessions and leases

    def depends_on(self, session_id: int) -> bool:
        """Return whether something still depends on the end of the session's process."""
        return self.leases.has_session(session_id) or self.buffers.knows(session_id)

    def close_session(self, session_id: int) -> None:
        """Close the session; its leases end, mapped ones are kept until its process has exited."""
        self._adopt(self.buffers.session_closed(session_id))
        self.leases.close_session(session_id)
        self.waiters.recheck()

    def session_exited(self, session_id: int) -> None:
        """End all leases of a client whose process has ended."""
        self._adopt(self.buffers.session_exited(session_id))
        self.leases.session_exited(session_id)
        self.waiters.recheck()

    # --- promotion from the tier below

    def reserve_promotion(self, entry: SsdChunk) -> Chunk | None:
        """Return a range for ``entry``; None if there is no room yet, see ``NodeChunks.has_more_to_evict``.

        Hard pins beyond the limit (memory became smaller, or others were pinned meanwhile) are soft pins here; below
        they stay hard.
        """
        left_s, pin = self.chunks.left_s(entry), entry.pin
        if pin is Pin.HARD and self.chunks.refuse_hard_pin(entry.key, entry.size_bytes):
            pin = Pin.SOFT
        new = NewChunk(entry.key, entry.version, entry.size_bytes, entry.checksums, pin, left_s, entry.replicas)
        reserved = self._try_reserve(new, None)
        return None if reserved is None else reserved.chunk

    def promote(self, chunk: Chunk, entry: SsdChunk) -> Chunk:
        """Promote ``entry``, its bytes in place; return its key's current chunk. Raises ChunkNotFound if it is gone.

        A chunk removed during the read does not come back.
        """
        existing = self.chunks.current(chunk.key)
        if existing is not None or not entry.held:
            self.chunks.abort_reservation(chunk)
            if existing is None:
                raise ChunkNotFound(f"{chunk.key!r} was dropped while it was read from the SSD tier")
            return existing
        self.chunks.publish(chunk, ChunkEvent.COMMIT_UNSEEN)
        self.chunks.end_batch()
        self.reports.add(chunk)
        return chunk

    # --- inside

    def check(self) -> None:
        """Assert the invariants of all parts, and that they agree with each other."""
        self.chunks.check([*self.buffers.ranges()])
        self.leases.check()
        self.reports.check()
        self.buffers.check()

    def __repr__(self) -> str:
        return f"NodeState({self.chunks!r}, {self.leases!r}, {self.buffers!r})"


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
    on_taken: OnTaken = ignore_taken,
) -> NodeState:
    """Return a node's decisions over ``capacity_bytes`` of memory, with its parts wired together.

    ``max_value_bytes`` 0: any size that fits into the memory. ``buffer_memory``: the memory, and the place of its
    AREA_BYTES for the heads and records of write buffers; without it there are none. ``make_tier`` is given a function
    that the tier calls for every chunk it has dropped. ``on_taken`` is called with each range of the memory that comes
    into use.
    """
    allocator = OffsetAllocator(capacity_bytes, on_taken=on_taken)
    published = published or Published()
    table, reports, waiters = ChunkTable(published), NodeReports(), WaitQueue()
    memory, area = buffer_memory

    def lost_below(entry: SsdChunk) -> None:
        if table.find(entry.key) is None:
            reports.remove(entry)

    chunks = NodeChunks(
        table,
        Space(allocator, table, make_policy, table.place, memory),
        NoTier() if make_tier is None else make_tier(lost_below),
        reports,
        tenants,
        clock=clock,
        on_freed=waiters.freed,
    )
    return NodeState(
        chunks,
        ChunkLeases(access, chunks),
        reports,
        WriteBuffers(allocator, clock, memory, area),
        waiters,
        published,
        clock=clock,
        generation=generation,
        max_value_bytes=max_value_bytes or capacity_bytes,
    )
