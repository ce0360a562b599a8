"""Everything still to be sent to one master: pure bookkeeping between the node's decisions and a conversation.

An outbox covers the ranges of keys owned by its master (see ``reports``). One message is in flight at a time; later
changes share the next one, so concurrent puts share a message. The master applies a message's removals before its
additions. So for each key the last event is enough: a key that was added and removed before the message left is only
removed; one that was removed and added is both. A failed message is put back *behind* later events, by the same rule.
``move`` does the same for ranges whose new owner is another outbox's master.

Puts that ended before they were complete are retracted, in case their clients have committed them at the master.
Retractions are sent once: those of a lost message are left to the master's timeout, since they might meet a second try
of the same put.

Removals name the version, so that a late one does not touch a later put of the key. If a master has been away until
more than MAX_QUEUED_REMOVALS wait, they are dropped, and a report of their ranges takes their place: chunks that it
does not name are gone.

A report (all chunks of some ranges; see ``slot_report``) is cut into pieces sent with the messages, one each, as
granted by the master.

The master may not know yet whether a put is the first of its key, because not all nodes have reported. Such a put is
parked until the master knows the slot of its key.

Example: put a, put b -> take() gives added=[a, b]. In flight: evict a, put c. The message fails: requeue. take() now
gives removed=[(a, version)], added=[b, c].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import TypeVar

from tanghulu.store.node.state.holdings import Holding
from tanghulu.store.node.state.slot_report import SlotPiece, SlotReport, SortedChunks
from tanghulu.store.protocol.announcements import Removal
from tanghulu.store.protocol.key_slots import ALL_RANGES, NUM_RANGES, RANGE_SLOTS, range_of, slot_of
from tanghulu.store.protocol.types import MAX_ANNOUNCED
from tanghulu.types import ChunkKey

MAX_REMOVED = 4096
#: Retractions in one message, and remembered ones.
MAX_RETRACTED = 4096
#: Removals waiting for a master, some 100 bytes each.
MAX_QUEUED_REMOVALS = 1 << 18
#: Removals moved to another master's outbox one by one: some 5 ms. More are left to reports.
MAX_MOVED_REMOVALS = 1 << 14


@dataclass(slots=True)
class ReportMessage:
    """One message to the master.

    ``report_id`` is of the running report, if any, ``ranges`` are those that it covers, and ``piece`` is a piece of it.
    For a key in one of the ``moved`` ranges the master's answer is void: another owns them now. None of its removals is
    of an earlier epoch (see Flushes) than ``epoch``.
    """

    added: list[Holding] = field(default_factory=list)
    removed: list[Removal] = field(default_factory=list)
    deleted: list[Removal] = field(default_factory=list)
    retracted: list[Removal] = field(default_factory=list)
    hot: list[tuple[ChunkKey, int]] = field(default_factory=list)
    failed_copies: list[ChunkKey] = field(default_factory=list)
    report_id: int = 0
    piece: SlotPiece | None = None
    ranges: frozenset[int] = frozenset()
    moved: Set[int] = frozenset()
    epoch: int = 0

    def concerns(self, key: ChunkKey) -> bool:
        """Return whether the master's answer on ``key`` counts."""
        return not self.moved or range_of(key) not in self.moved


class Flushes:
    """Callers waiting until all masters know of earlier removals, with the ranges that are still unacknowledged.

    Each begins another epoch, and waits for the removals of those before: later ones may follow without end.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._open: dict[Callable[[], None], tuple[int, set[int]]] = {}
        self._ranges: set[int] = set()  # of all of them

    def add(self, done: Callable[[], None], ranges: Set[int]) -> None:
        """Call ``done`` when the removals of all ``ranges`` until now are acknowledged."""
        self._open[done] = self.epoch, set(ranges)
        self.epoch += 1
        self._ranges |= ranges

    def discard(self, done: Callable[[], None]) -> None:
        """Forget ``done``, if it is there."""
        if self._open.pop(done, None) is not None:
            self._add_up()

    def wait_for(self, ranges: Set[int]) -> bool:
        """Return whether anybody waits for one of ``ranges``."""
        return not self._ranges.isdisjoint(ranges)

    def acknowledged(self, ranges: Set[int], epoch: int) -> None:
        """Record that the owner of ``ranges`` has all removals there of the epochs before ``epoch``."""
        for done, (own, waiting) in list(self._open.items()):
            if own < epoch:
                waiting -= ranges
                if not waiting:
                    del self._open[done]
                    done()
        self._add_up()

    def _add_up(self) -> None:
        self._ranges = set[int]().union(*(waiting for _, waiting in self._open.values()))


class MasterOutbox:
    """See the module: ``take`` makes a message, ``done`` or ``requeue`` ends it.

    ``ranges`` are those of its master. ``hot`` are the most-read keys, ``failed_copies`` failed copies ordered by the
    master; both are sent with the next message.
    """

    def __init__(self, flushes: Flushes, ranges: frozenset[int] = ALL_RANGES) -> None:
        self.ranges = ranges
        self.hot: list[tuple[ChunkKey, int]] = []
        self.failed_copies: list[ChunkKey] = []
        self._flushes = flushes
        self._added: dict[ChunkKey, Holding] = {}
        self._low_priority: dict[ChunkKey, Holding] = {}  # added, and nobody waits for it
        self._parked: dict[ChunkKey, Holding] = {}  # added, and the master does not know their slots yet
        self._removed: dict[Removal, int] = {}  # with their epochs, see Flushes
        self._deleted: dict[Removal, int] = {}
        self._retracted: list[Removal] = []
        self._report: SlotReport | None = None
        self._unreported: set[int] = set()  # ranges that need a report
        self._dropped: set[int] = set()  # ranges with dropped removals, until a later report has ended
        self._granted_keys = 0
        self._known = bytes(NUM_RANGES)  # slots of each range known to the master
        self._in_flight: ReportMessage | None = None

    def add(self, chunk: Holding, *, low_priority: bool = False) -> None:
        """Add ``chunk``, now held by the node; ``low_priority``: no message is sent for it alone."""
        key = chunk.key
        if self._removed:
            self._removed.pop(Removal(key, chunk.version), None)
        for added in filter(None, (self._added, self._low_priority, self._parked)):
            added.pop(key, None)
        (self._low_priority if low_priority else self._added)[key] = chunk

    def remove(self, chunk: Holding, *, deleted: bool = False) -> None:
        """Remove a chunk: ``deleted`` on a client's order, or evicted, expired, corrupt."""
        self.forget(chunk)
        queue = self._deleted if deleted else self._removed
        queue.setdefault(Removal(chunk.key, chunk.version), self._flushes.epoch)
        if len(self._removed) > MAX_QUEUED_REMOVALS:
            self._leave_removals_to_report()
        if len(self._deleted) > MAX_QUEUED_REMOVALS:  # the oldest are evictions now: copies elsewhere may come back
            oldest = next(iter(self._deleted))
            del self._deleted[oldest]
            self._leave_to_report({range_of(oldest.key)})

    def _leave_removals_to_report(self) -> None:
        self._removed.clear()
        self._leave_to_report(self.ranges)

    def _leave_to_report(self, numbers: Set[int]) -> None:
        self._dropped |= numbers
        self._unreported |= numbers  # a running report may have named them already

    def retract(self, key: ChunkKey, version: int) -> None:
        """Retract a client's possible commit at the master of a put that failed here."""
        if len(self._retracted) < MAX_RETRACTED:
            self._retracted.append(Removal(key, version))

    def again(self, chunk: Holding) -> None:
        """Report ``chunk`` once more when the master knows the slot, as it could not decide yet."""
        if chunk.held and chunk.key not in self._added and chunk.key not in self._low_priority:
            (self._low_priority if self._is_known(chunk.key) else self._parked)[chunk.key] = chunk

    def _is_known(self, key: ChunkKey) -> bool:
        number, slot = divmod(slot_of(key), RANGE_SLOTS)
        return slot < self._known[number]

    def forget(self, chunk: Holding) -> None:
        """Forget ``chunk``, rejected by the master: there is nothing to add, and nothing to remove there."""
        for added in (self._added, self._low_priority, self._parked):
            if added.get(chunk.key) is chunk:
                del added[chunk.key]

    def _queued(self, key: ChunkKey) -> Holding | None:
        """Return the chunk of ``key`` that the next messages will add."""
        return self._added.get(key) or self._low_priority.get(key) or self._parked.get(key)

    def is_pending(self, chunk: Holding) -> bool:
        """Return whether the master has not yet confirmed ``chunk``."""
        if self._queued(chunk.key) is chunk:
            return True
        message = self._in_flight
        return message is not None and chunk in message.added and message.concerns(chunk.key)

    def is_version_pending(self, chunk: Holding) -> bool:
        """Return the same for ``chunk``, or for its copy in another tier."""
        queued = self._queued(chunk.key)
        return (queued is not None and queued.version == chunk.version) or self.is_pending(chunk)

    def raise_priority(self, chunk: Holding) -> None:
        """Report ``chunk`` without delay, as a caller waits for the master's answer on it now."""
        if self._low_priority.get(chunk.key) is chunk:
            self._added[chunk.key] = self._low_priority.pop(chunk.key)

    def move(self, numbers: frozenset[int], heir: MasterOutbox) -> None:
        """Leave these ranges to ``heir``, whose master needs a report of everything held there."""
        if self._in_flight is not None:
            self._put_back(self._in_flight, numbers)
            self._in_flight.moved |= numbers
        if len(self._removed) > MAX_MOVED_REMOVALS:
            self._leave_removals_to_report()
        heir._added.update(_taken(self._added, numbers, str))
        heir._low_priority.update(_taken(self._low_priority, numbers, str) | _taken(self._parked, numbers, str))
        heir._removed.update(_taken(self._removed, numbers, itemgetter(0)))
        heir._deleted.update(_taken(self._deleted, numbers, itemgetter(0)))
        moved = [each for each in self._retracted if range_of(each.key) in numbers]
        self._retracted = [each for each in self._retracted if range_of(each.key) not in numbers]
        heir._retracted = (heir._retracted + moved)[:MAX_RETRACTED]
        heir._dropped |= self._dropped & numbers
        self.ranges -= numbers
        self._dropped -= numbers
        self._unreported -= numbers
        if self._report is not None:
            self._report.drop(numbers)
            self._end_report_if_over()
        heir.ranges |= numbers
        heir._forget_known(numbers)
        heir.want_report(numbers)

    # --- reports

    def want_report(self, numbers: Iterable[int]) -> None:
        """Report all of these ranges to the master; a running report may do that already."""
        covered = frozenset[int]() if self._report is None else self._report.ranges
        self._unreported.update(self.ranges.intersection(numbers) - covered)

    def want_whole_report(self) -> None:
        """Report everything to the master, from the beginning."""
        self._report, self._unreported = None, set(self.ranges)

    def begin_report(
        self,
        report_id: int,
        chunks: SortedChunks,
        is_reported: Callable[[Holding], bool],
        deleted: Iterable[Removal] = (),
    ) -> None:
        """Begin a report of all requested ranges; ``is_reported`` selects the chunks that belong in it.

        The last removals by clients, ``deleted``, are repeated so that a new master does not admit copies of those
        chunks.
        """
        numbers, self._unreported = frozenset(self._unreported), set()
        for each in deleted:
            if range_of(each.key) in numbers:
                self._deleted.setdefault(each, self._flushes.epoch)
        self._report = SlotReport(report_id, chunks, is_reported, numbers)
        self._granted_keys = 0
        self._forget_known(numbers)
        self._low_priority.update(self._parked)  # this may be another master
        self._parked.clear()

    def _forget_known(self, numbers: Set[int]) -> None:
        self._known = bytes(0 if number in numbers else known for number, known in enumerate(self._known))

    @property
    def report_wanted(self) -> bool:
        """Whether a report must begin: of ranges with a new owner, or with dropped removals."""
        return bool(self._unreported) and self._report is None

    @property
    def is_reporting(self) -> bool:
        """Whether a report is running, or must begin."""
        return self._report is not None or bool(self._unreported)

    @property
    def unsorted(self) -> SortedChunks | None:
        """The chunks of the running report, if they have yet to be sorted."""
        return None if self._report is None or self._report.chunks.is_sorted else self._report.chunks

    def granted(self, num_keys: int, known: bytes) -> None:
        """Record the master's grant of ``num_keys`` keys for the next piece, and its known slots of each range."""
        self._granted_keys = num_keys
        if known == self._known:
            return
        self._known = known
        for key in [key for key in self._parked if self._is_known(key)]:
            self._low_priority[key] = self._parked.pop(key)

    @property
    def _may_report(self) -> bool:
        return self._report is not None and self._report.chunks.is_sorted and self._granted_keys > 0

    @property
    def waits_for_master(self) -> bool:
        """Whether the master's next answer may allow progress: by a grant, or by known slots."""
        return self._report is not None or bool(self._parked)

    # --- messages

    @property
    def urgent(self) -> bool:
        """Whether a caller waits: for an addition, a flush, or a report that may continue."""
        return bool(self._added) or self._may_report or self._flushes.wait_for(self.ranges)

    @property
    def removals_acknowledged(self) -> bool:
        """Whether the master has all removals, by messages or by a report in their place."""
        message = self._in_flight
        is_in_flight = message is not None and bool(message.removed or message.deleted)
        return not (self._removed or self._deleted or self._dropped or is_in_flight)

    def _oldest_epoch(self) -> int:
        """Return the epoch of the oldest queued removal; the present one if there is none."""
        return min(chain(self._removed.values(), self._deleted.values()), default=self._flushes.epoch)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to send."""
        return not (self._added or self._low_priority or self._removed or self._deleted or self._retracted)

    def take(self) -> ReportMessage:
        """Return the next message; possibly empty (a sign of life)."""
        assert self._in_flight is None, "one message at a time"
        message = ReportMessage(
            epoch=self._oldest_epoch(),  # before they are taken
            added=_take_some(self._added, MAX_ANNOUNCED),
            removed=_take_keys(self._removed, MAX_REMOVED),
            deleted=_take_keys(self._deleted, MAX_REMOVED),
            retracted=self._retracted,
            hot=self.hot,
            failed_copies=self.failed_copies,
        )
        self._retracted, self.hot, self.failed_copies = [], [], []
        message.added += _take_some(self._low_priority, MAX_ANNOUNCED - len(message.added))
        report = self._report
        if report is not None:
            message.report_id, message.ranges = report.report_id, report.ranges
            if self._may_report:
                message.piece = report.take(self._granted_keys)
        self._in_flight = message
        return message

    def done(self) -> None:
        """Record that the message in flight was answered."""
        message, self._in_flight = self._in_flight, None
        assert message is not None, "no message is in flight"
        report = self._report
        if message.piece is not None and report is not None and report.report_id == message.report_id:
            report.done()  # otherwise the piece was of a report given up meanwhile
            self._end_report_if_over()
        if not self._dropped and self._flushes.wait_for(self.ranges):
            self._flushes.acknowledged(self.ranges, self._oldest_epoch())

    def _end_report_if_over(self) -> None:
        if self._report is not None and self._report.is_over:
            self._dropped -= self._report.ranges - self._unreported
            self._report = None

    def requeue(self) -> None:
        """Send the contents of the message in flight again, unless outdated, as it may not have arrived."""
        message, self._in_flight = self._in_flight, None
        assert message is not None, "no message is in flight"
        self._granted_keys = 0
        self._retracted.clear()
        self._put_back(message, self.ranges)

    def _put_back(self, message: ReportMessage, numbers: frozenset[int]) -> None:
        """Queue the additions and removals of ``message`` of these ranges behind later ones."""
        numbers -= message.moved
        for chunk in message.added:
            if chunk.held and range_of(chunk.key) in numbers and self._queued(chunk.key) is None:
                self._added[chunk.key] = chunk
        for queued, sent in ((self._removed, message.removed), (self._deleted, message.deleted)):
            queued.update((each, message.epoch) for each in sent if range_of(each.key) in numbers)

    def check(self) -> None:
        """Assert that only existing chunks wait to be reported, and only those of the master's ranges."""
        assert not self._added.keys() & self._low_priority.keys()
        assert not self._parked.keys() & (self._added.keys() | self._low_priority.keys())
        assert len(self._retracted) <= MAX_RETRACTED
        assert len(self._removed) <= MAX_QUEUED_REMOVALS + MAX_REMOVED
        for key, chunk in (*self._added.items(), *self._low_priority.items(), *self._parked.items()):
            assert chunk.key == key
            assert chunk.held, f"{chunk!r} waits to be reported"
        queued = (*self._added, *self._low_priority, *self._parked)
        removed = (each.key for each in (*self._removed, *self._deleted))
        assert all(range_of(key) in self.ranges for key in (*queued, *removed))
        assert self._unreported <= self.ranges
        assert self._dropped <= self.ranges
        reported = frozenset[int]() if self._report is None else self._report.ranges
        assert reported <= self.ranges
        assert self._dropped <= reported | self._unreported

    def __repr__(self) -> str:
        num_added = len(self._added) + len(self._low_priority) + len(self._parked)
        return f"MasterOutbox(+{num_added} -{len(self._removed) + len(self._deleted)})"


def _take_some(pending: dict[ChunkKey, Holding], limit: int) -> list[Holding]:
    if len(pending) <= limit:
        taken = list(pending.values())
        pending.clear()
        return taken
    return [pending.pop(key) for key in list(pending)[:limit]]


def _take_keys(pending: dict[Removal, int], limit: int) -> list[Removal]:
    taken = list(pending)[:limit]
    for key in taken:
        del pending[key]
    return taken


_K = TypeVar("_K")
_V = TypeVar("_V")


def _taken(pending: dict[_K, _V], numbers: Set[int], key_of: Callable[[_K], str]) -> dict[_K, _V]:
    """Remove and return everything of these ranges."""
    return {each: pending.pop(each) for each in [each for each in pending if range_of(key_of(each)) in numbers]}
