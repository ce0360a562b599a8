"""What all masters still have to be told: a ReportQueue for each that owns ranges of keys, and the way there. Pure.

As long as a node has heard of one master only, that one's queue has everything. Later each range is in the queue of its
owner; what nobody owns now waits in a queue of its own. When the map moves a range, what waits for its owner, or is
under way there, goes to the queue of the new one, and the range is reported there from its beginning.

Who waits for the masters' answers waits for all of them: ``confirm`` for those on some chunks, whoever owns their keys,
and ``flush`` until all masters know what was removed.

Example: A owns everything, and a put of "kv/a" (range 50) is under way to it. The map moves range 50 to B: the put
waits in B's queue now, and what A says of it means nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

from tanghulu.errors import TanghuluError
from tanghulu.store.node.state.confirmations import Confirmations, Done
from tanghulu.store.node.state.holdings import Holding
from tanghulu.store.node.state.report_queue import MAX_RETRACTED, Flush, ReportQueue
from tanghulu.store.node.state.slot_report import SortedChunks
from tanghulu.store.protocol.announcements import Removal
from tanghulu.store.protocol.key_slots import ALL_RANGES, NUM_RANGES, range_of
from tanghulu.store.protocol.range_map import RangeMap
from tanghulu.store.protocol.terms import Term
from tanghulu.types import Address, ChunkKey

#: Removals by clients that are repeated with a report, as the master may have succeeded the one that received them.
MAX_REPEATED = 1 << 14


class ReportQueues:
    """See the module. ``leader`` has everything as long as no ``map`` is known, and nothing later."""

    def __init__(self) -> None:
        self.leader = ReportQueue()
        self.map: RangeMap | None = None
        self._owners: dict[Address, ReportQueue] = {}
        self._vacant = ReportQueue(frozenset())
        self._by_range = [self.leader] * NUM_RANGES
        self._confirmations = Confirmations()
        self._void: dict[Removal, None] = {}  # the last puts that were retracted
        self._deleted: dict[Removal, None] = {}  # the last chunks that clients removed
        self._report_ids = itertools.count(1)

    def of(self, key: ChunkKey) -> ReportQueue:
        """The queue of the master that owns ``key``."""
        return self.leader if self.map is None else self._by_range[range_of(key)]

    @property
    def owners(self) -> Mapping[Address, ReportQueue]:
        """The queues of the masters that own ranges; a view that changes with the map."""
        return self._owners

    def _all(self) -> Iterator[ReportQueue]:
        yield self.leader
        yield self._vacant
        yield from self._owners.values()

    # --- the map

    @property
    def has_vacant(self) -> bool:
        """Whether some range has no owner now."""
        return bool(self._vacant.ranges)

    def take_map(self, known: RangeMap) -> None:
        """Go by ``known`` from now on."""
        before, self.map = self.map, known
        moved = ALL_RANGES if before is None else known.moved(before)
        ways: dict[tuple[ReportQueue, ReportQueue], set[int]] = {}
        for number in moved:
            owner = known.owner_of(number)
            target = self._vacant
            if owner is not None:
                target = self._owners.setdefault(owner, ReportQueue(frozenset()))
            ways.setdefault((self._by_range[number], target), set()).add(number)
            self._by_range[number] = target
        for (source, target), numbers in ways.items():
            target.take_over(source.hand_over(frozenset(numbers)), frozenset(numbers))
        for queue in [each for each in self._all() if not each.ranges]:
            queue.forget_flushes()
        self._owners = {owner: queue for owner, queue in self._owners.items() if queue.ranges}

    def is_over(self, key: ChunkKey, term: Term) -> bool:
        """Whether the owner of ``key`` has changed since a master of ``term`` took a commit of it."""
        known = self.map
        if known is None:
            return False
        return term.cluster == known.cluster and 0 < term.number < known.term_of(range_of(key))

    # --- what happens to chunks; see ReportQueue

    def add(self, chunk: Holding, *, patient: bool = False, unconfirmed: bool = False) -> None:
        """The node holds ``chunk`` now."""
        self.of(chunk.key).add(chunk, patient=patient, unconfirmed=unconfirmed)

    def remove(self, chunk: Holding, *, deleted: bool = False) -> None:
        """The node holds it no longer."""
        self.of(chunk.key).remove(chunk, deleted=deleted)
        if deleted:
            self._deleted[Removal(chunk.key, chunk.version)] = None
            if len(self._deleted) > MAX_REPEATED:
                del self._deleted[next(iter(self._deleted))]

    def retract(self, key: ChunkKey, version: int) -> None:
        """Take back what a client may have told a master of a put that failed here."""
        self.of(key).retract(key, version)
        self._void[Removal(key, version)] = None
        if len(self._void) > MAX_RETRACTED:
            del self._void[next(iter(self._void))]

    def has_retracted(self, key: ChunkKey, version: int) -> bool:
        """Whether an earlier try of this put was retracted: a master's word on it means nothing."""
        return (key, version) in self._void

    def again(self, chunk: Holding) -> None:
        """The master could not yet tell whether ``chunk`` stands."""
        self.of(chunk.key).again(chunk)

    def forget(self, chunk: Holding) -> None:
        """The master does not want ``chunk``."""
        self.of(chunk.key).forget(chunk)

    def accepted(self, chunk: Holding) -> None:
        """The master has accepted ``chunk``."""
        self.of(chunk.key).accepted(chunk)

    def is_unconfirmed(self, chunk: Holding) -> bool:
        """Whether no master has accepted ``chunk``."""
        return self.of(chunk.key).is_unconfirmed(chunk)

    def is_pending(self, chunk: Holding) -> bool:
        """Whether its master has not yet confirmed ``chunk``."""
        return self.of(chunk.key).is_pending(chunk)

    # --- who waits for the masters' answers

    def confirm(self, chunks: Sequence[Holding], until_s: float, done: Done) -> bool:
        """Call ``done`` with the masters' answers on each of ``chunks``; returns whether any has yet to be reported.

        See Confirmations; those that nobody waited for so far are reported without delay from now on.
        """
        pending = [chunk for chunk in chunks if self.is_pending(chunk)]
        self._confirmations.expect(chunks, pending, until_s, done)
        for chunk in pending:
            self.of(chunk.key).hasten(chunk)
        return bool(pending)

    def settle(self, chunk: Holding, stands: bool) -> None:
        """Tell the putters that wait for the master's answer on ``chunk`` whether it ``stands``."""
        self._confirmations.settle(chunk, stands)

    def settle_gone(self) -> None:
        """End the waits for chunks that were dropped before a master was asked about them: nobody will be."""
        for chunk in self._confirmations.awaited:
            if not chunk.held and not self.of(chunk.key).is_version_pending(chunk):
                self.settle(chunk, stands=True)

    def expire(self, now_s: float, error: TanghuluError) -> list[Holding]:
        """End waits that lasted long enough with ``error``; returns the chunks that nobody waits for any more."""
        return self._confirmations.expire(now_s, error)

    @property
    def next_expiry_s(self) -> float | None:
        """When the first wait has lasted long enough."""
        return self._confirmations.next_s

    def flush(self, done: Callable[[], None]) -> Flush:
        """Call ``done`` when all masters know what was removed until now; at once if they do."""
        flush = Flush(done)
        for queue in self._all():
            queue.flush(flush)
        if not flush.queues:
            done()
        return flush

    def forget_flush(self, flush: Flush) -> None:
        """Nobody waits for ``flush`` any more."""
        for queue in self._all():
            queue.forget_flush(flush)

    @property
    def removals_told(self) -> bool:
        """Whether no removal waits for the next message, or for a report in its place."""
        return all(queue.removals_told for queue in self._all())

    # --- reports

    def begin_report(self, chunks: list[Holding], is_reported: Callable[[Holding], bool]) -> None:
        """Tell everything again; reports that were under way are given up. See ``begin_wanted``."""
        for queue in self._reporting():
            queue.want_whole_report()
        self.begin_wanted(chunks, is_reported)

    def begin_wanted(self, chunks: list[Holding], is_reported: Callable[[Holding], bool]) -> None:
        """Begin the reports that are wanted. ``chunks`` is theirs from now on; ``is_reported``: see ReportQueue."""
        in_slots = SortedChunks(chunks)
        for queue in self._reporting():
            if queue.report_wanted:
                queue.begin_report(next(self._report_ids), in_slots, is_reported, self._deleted)

    def _reporting(self) -> list[ReportQueue]:
        return [self.leader] if self.map is None else list(self._owners.values())

    @property
    def report_wanted(self) -> bool:
        """Whether reports must begin."""
        return any(queue.report_wanted for queue in self._reporting())

    @property
    def is_reporting(self) -> bool:
        """Whether reports are under way, or must begin."""
        return any(queue.is_reporting for queue in self._all())

    @property
    def is_unsorted(self) -> bool:
        """Whether a report has yet to be sorted."""
        return any(queue.is_unsorted for queue in self._reporting())

    def sort_report(self, num_chunks: int) -> None:
        """Prepare reports, ``num_chunks`` chunks further."""
        for queue in self._reporting():
            if queue.is_unsorted:
                queue.sort_report(num_chunks)
                return

    def check(self) -> None:
        """Assert that each range is in one queue, and that the waiting puts are counted."""
        self._confirmations.check()
        assert len(self._void) <= MAX_RETRACTED
        assert len(self._deleted) <= MAX_REPEATED
        for queue in self._all():
            queue.check()
            assert all((self._by_range[number] is queue) == (number in queue.ranges) for number in range(NUM_RANGES))
        if self.map is not None:
            assert not self.leader.ranges
            assert self._owners.keys() == {owner for owner in self.map.owners if owner is not None}

    def __repr__(self) -> str:
        return f"ReportQueues({self.leader!r}, {len(self._owners)} owners)"
