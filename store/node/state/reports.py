"""Everything still to be sent to the masters: a MasterOutbox for each that owns ranges of keys. Pure.

While a node has met one master only, that one's outbox has everything. Later each range is in the outbox of its owner;
ranges without an owner wait in an outbox of their own. When the map moves a range, its queued events, and those in
flight, go to the outbox of the new owner, and the range is reported there from its beginning.

Each pending put is *unconfirmed* until a master, this one or its predecessor, has accepted it; accepted puts count at
once at a new master.

Waiters wait for all masters: ``confirm`` for answers on some chunks, from any owners, and ``flush`` until all masters
have the earlier removals.

Example: A owns everything, and a put of "kv/a" (range 50) is in flight to it. The map moves range 50 to B: the put
waits in B's outbox now, and A's answer on it is void.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from tanghulu.errors import TanghuluError
from tanghulu.store.node.state.confirmations import Confirmations, Done
from tanghulu.store.node.state.holdings import Holding
from tanghulu.store.node.state.outbox import MAX_RETRACTED, Flushes, MasterOutbox
from tanghulu.store.node.state.slot_report import SortedChunks
from tanghulu.store.protocol.announcements import Removal
from tanghulu.store.protocol.key_slots import ALL_RANGES, NUM_RANGES, range_of
from tanghulu.store.protocol.range_map import RangeMap
from tanghulu.store.protocol.terms import Term
from tanghulu.types import Address, ChunkKey

#: Removals by clients repeated with a report, as the master may have succeeded the one that received them.
MAX_REPEATED = 1 << 14


class NodeReports:
    """See the module. ``leader`` has everything while no ``map`` is known, and nothing later."""

    def __init__(self) -> None:
        self._flushes = Flushes()
        self.leader = MasterOutbox(self._flushes)
        self.map: RangeMap | None = None
        self.owners: dict[Address, MasterOutbox] = {}  # of the masters that own ranges
        self._vacant = MasterOutbox(self._flushes, frozenset())
        self._by_range = [self.leader] * NUM_RANGES
        self._unconfirmed: dict[ChunkKey, int] = {}  # the versions of puts not accepted by any master
        self._confirmations = Confirmations()
        self._void: dict[Removal, None] = {}  # the last retracted puts
        self._deleted: dict[Removal, None] = {}  # the last chunks removed by clients
        self._report_ids = itertools.count(1)
        #: Called with each chunk that is held now, in its tier, or no longer.
        self.watch: Callable[[Holding, bool], None] | None = None

    def of(self, key: ChunkKey) -> MasterOutbox:
        """Return the outbox of the master that owns ``key``."""
        return self.leader if self.map is None else self._by_range[range_of(key)]

    def _with_master(self) -> Iterator[MasterOutbox]:
        yield self.leader
        yield from self.owners.values()

    def _all(self) -> Iterator[MasterOutbox]:
        yield from self._with_master()
        yield self._vacant

    # --- the map

    @property
    def has_vacant(self) -> bool:
        """Whether some range has no owner now."""
        return bool(self._vacant.ranges)

    def take_map(self, known: RangeMap) -> None:
        """Use the map ``known`` from now on."""
        before, self.map = self.map, known
        moves: dict[tuple[MasterOutbox, MasterOutbox], set[int]] = {}
        for number in ALL_RANGES if before is None else known.moved(before):
            owner = known.owner_of(number)
            heir = self._vacant
            if owner is not None:
                heir = self.owners.setdefault(owner, MasterOutbox(self._flushes, frozenset()))
            moves.setdefault((self._by_range[number], heir), set()).add(number)
            self._by_range[number] = heir
        for (source, heir), numbers in moves.items():
            source.move(frozenset(numbers), heir)
        self.owners = {owner: outbox for owner, outbox in self.owners.items() if outbox.ranges}

    def is_over(self, key: ChunkKey, term: Term) -> bool:
        """Return whether the owner of ``key`` has changed since a master of ``term`` accepted a commit of it."""
        known = self.map
        if known is None:
            return False
        return term.cluster == known.cluster and 0 < term.number < known.term_of(range_of(key))

    # --- chunks

    def add(self, chunk: Holding, *, low_priority: bool = False, unconfirmed: bool = False) -> None:
        """Add ``chunk``, now held here; ``low_priority``: the master knows it, so no message is sent for it alone.

        ``unconfirmed``: no master has accepted this put. A chunk that only moved to another tier keeps its status.
        """
        if unconfirmed:
            self._unconfirmed[chunk.key] = chunk.version
        elif low_priority:
            self._unconfirmed.pop(chunk.key, None)
        self.of(chunk.key).add(chunk, low_priority=low_priority)
        self._watched(chunk, held=True)

    def remove(self, chunk: Holding, *, deleted: bool = False) -> None:
        """Remove a chunk: ``deleted`` on a client's order, or evicted, expired, corrupt."""
        self.confirmed(chunk)
        self.of(chunk.key).remove(chunk, deleted=deleted)
        self._watched(chunk, held=False)
        if deleted:
            _remember(self._deleted, Removal(chunk.key, chunk.version), MAX_REPEATED)

    def retract(self, key: ChunkKey, version: int) -> None:
        """Retract a client's possible commit at a master of a put that failed here."""
        self.of(key).retract(key, version)
        _remember(self._void, Removal(key, version), MAX_RETRACTED)

    def has_retracted(self, key: ChunkKey, version: int) -> bool:
        """Return whether an earlier try of this put was retracted: a commit of it at a master is void."""
        return (key, version) in self._void

    def forget(self, chunk: Holding) -> None:
        """Forget ``chunk``, rejected by the master: there is nothing to add, and nothing to remove there."""
        self.confirmed(chunk)
        self.of(chunk.key).forget(chunk)
        self._watched(chunk, held=False)

    def _watched(self, chunk: Holding, *, held: bool) -> None:
        if self.watch is not None:
            self.watch(chunk, held)

    def confirmed(self, chunk: Holding) -> None:
        """Record that a master has accepted ``chunk``, or that it is gone."""
        if self._unconfirmed.get(chunk.key) == chunk.version:
            del self._unconfirmed[chunk.key]

    def is_unconfirmed(self, chunk: Holding) -> bool:
        """Return whether no master has accepted ``chunk``."""
        return self._unconfirmed.get(chunk.key) == chunk.version

    def is_pending(self, chunk: Holding) -> bool:
        """Return whether its master has not yet confirmed ``chunk``."""
        return self.of(chunk.key).is_pending(chunk)

    def report_hot(self, keys: Sequence[tuple[ChunkKey, int]]) -> None:
        """Report the most-read ``keys`` and their numbers of gets to their masters, replacing earlier ones."""
        for outbox in self._all():
            outbox.hot = []
        for key, num_gets in keys:
            self.of(key).hot.append((key, num_gets))

    def copy_failed(self, key: ChunkKey) -> None:
        """Report a failed copy to the master that ordered it, unless nobody owns the key now."""
        outbox = self.of(key)
        if outbox is not self._vacant:
            outbox.failed_copies.append(key)

    # --- waiters

    def confirm(self, chunks: Sequence[Holding], until_s: float, done: Done) -> bool:
        """Call ``done`` with the masters' answers on each of ``chunks``; return whether any has yet to be reported.

        See Confirmations; chunks without a waiter until now are reported without delay.
        """
        pending = [chunk for chunk in chunks if self.is_pending(chunk)]
        self._confirmations.expect(chunks, pending, until_s, done)
        for chunk in pending:
            self.of(chunk.key).raise_priority(chunk)
        return bool(pending)

    def settle(self, chunk: Holding, stands: bool) -> None:
        """Answer the puts that wait for the master's decision on ``chunk``: whether it ``stands``."""
        self._confirmations.settle(chunk, stands)

    def settle_gone(self) -> None:
        """End the waits for chunks dropped before a master received them: none will."""
        for chunk in self._confirmations.awaited:
            if not chunk.held and not self.of(chunk.key).is_version_pending(chunk):
                self.settle(chunk, stands=True)

    def expire(self, now_s: float, error: TanghuluError) -> list[Holding]:
        """End waits past their deadline with ``error``; return the chunks that nobody waits for any more."""
        return self._confirmations.expire(now_s, error)

    @property
    def next_expiry_s(self) -> float | None:
        """Time at which the first wait ends."""
        return self._confirmations.next_s

    def flush(self, done: Callable[[], None]) -> None:
        """Call ``done`` when all masters know of the removals until now; at once if they do."""
        unacknowledged = [outbox.ranges for outbox in self._all() if not outbox.removals_acknowledged]
        ranges = frozenset[int]().union(*unacknowledged)
        if ranges:
            self._flushes.add(done, ranges)
        else:
            done()

    def forget_flush(self, done: Callable[[], None]) -> None:
        """Forget the flush that calls ``done``, as nobody waits for it any more."""
        self._flushes.discard(done)

    @property
    def removals_acknowledged(self) -> bool:
        """Whether all masters know of all removals."""
        return all(outbox.removals_acknowledged for outbox in self._all())

    # --- reports of everything

    def want_reports(self) -> None:
        """Report everything again; running reports are given up."""
        for outbox in self._with_master():
            outbox.want_whole_report()

    def begin_reports(self, chunks: list[Holding], is_reported: Callable[[Holding], bool]) -> None:
        """Begin the requested reports, of ``chunks``, which are theirs from now on.

        ``is_reported`` selects those that belong in a report; unconfirmed ones are announced like new ones.
        """
        sorting = SortedChunks(chunks)

        def is_confirmed(chunk: Holding) -> bool:
            return is_reported(chunk) and not self.is_unconfirmed(chunk)

        for outbox in self._with_master():
            if outbox.report_wanted:
                outbox.begin_report(next(self._report_ids), sorting, is_confirmed, self._deleted)

    @property
    def report_wanted(self) -> bool:
        """Whether reports must begin."""
        return any(outbox.report_wanted for outbox in self._with_master())

    @property
    def is_reporting(self) -> bool:
        """Whether reports are running, or must begin."""
        return any(outbox.is_reporting for outbox in self._all())

    @property
    def unsorted(self) -> SortedChunks | None:
        """The chunks of a report that have yet to be sorted."""
        return next(filter(None, (outbox.unsorted for outbox in self._with_master())), None)

    def check(self) -> None:
        """Assert that each range is in one outbox, and that the waiting puts are counted."""
        self._confirmations.check()
        assert len(self._void) <= MAX_RETRACTED
        assert len(self._deleted) <= MAX_REPEATED
        for outbox in self._all():
            outbox.check()
            assert all((self._by_range[number] is outbox) == (number in outbox.ranges) for number in range(NUM_RANGES))
        if self.map is not None:
            assert not self.leader.ranges
            assert self.owners.keys() == {owner for owner in self.map.owners if owner is not None}

    def __repr__(self) -> str:
        return f"NodeReports({self.leader!r}, {len(self.owners)} owners)"


def _remember(last: dict[Removal, None], removal: Removal, most: int) -> None:
    last[removal] = None
    if len(last) > most:
        del last[next(iter(last))]
