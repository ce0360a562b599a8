"""What one master still has to be told: pure bookkeeping between the node's decisions and a conversation.

A queue is of the ranges of keys that its master owns (see ``report_queues``): ``hand_over`` takes what waits for some
of them out, of the message under way, too, and ``take_over`` puts it into the queue of their new owner.

One message is under way at a time; what comes up meanwhile goes into the next one together, so concurrent puts share a
message. The master applies a message's removals before its additions. So for each key the last thing that happened
is enough: a key that was added and removed before the message left is only removed; one that was removed and added is
both. A message that failed is put back *behind* what happened since, by the same rule.

Puts that ended before they were whole are retracted, in case that their clients have committed them at the master. That
is told once: what a lost message said is left to the master's patience, since it might meet a second try of the same
put.

Removals name the version, so that one that is told late does not touch a later put of the key. If a master has been
away for so long that more than MAX_QUEUED_REMOVALS wait, they are dropped for a report: what it does not name is gone.

A report (everything that the node holds; see ``slot_report``) is cut into pieces that ride on the messages, one each,
as the master grants them.

The master may not know yet whether a put is the first of its key, because not all nodes have reported. Such a put is
parked until the master knows the slot of its key. So each chunk that waits is *unconfirmed* or not: whether a master,
this one or its predecessor, has accepted it; what was accepted counts at once at a new master.

Example: put a, put b -> take() gives added=[a, b]. Under way: evict a, put c. The message fails: requeue. take() now
gives removed=[(a, version)], added=[b, c].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from typing import TypeVar

from tanghulu.store.node.state.holdings import Holding
from tanghulu.store.node.state.slot_report import SlotPiece, SlotReport, SortedChunks
from tanghulu.store.protocol.announcements import Removal
from tanghulu.store.protocol.key_slots import ALL_RANGES, RANGE_SLOTS, known_below, range_of, slot_of
from tanghulu.store.protocol.types import MAX_ANNOUNCED
from tanghulu.types import ChunkKey

MAX_REMOVED = 4096
#: Retractions told in one message, and those that are remembered.
MAX_RETRACTED = 4096
#: Removals that wait for a master, some 100 bytes each.
MAX_QUEUED_REMOVALS = 1 << 18
#: Of those that wait for a master, what is told its successor one by one: some 5 ms. More are left to the report.
MAX_MOVED_REMOVALS = 1 << 14


@dataclass(slots=True)
class ReportMessage:
    """One message to the master; ``unconfirmed`` says of each of ``added`` whether no master has accepted it yet.

    ``report_id`` is of the report that is under way, if one is, ``ranges`` are those that it is of, and ``piece`` is a
    piece of it. What the master says of a key in one of the ``moved`` ranges means nothing: another owns them now.
    """

    added: list[Holding] = field(default_factory=list)
    unconfirmed: list[bool] = field(default_factory=list)
    removed: list[Removal] = field(default_factory=list)
    deleted: list[Removal] = field(default_factory=list)
    retracted: list[Removal] = field(default_factory=list)
    report_id: int = 0
    piece: SlotPiece | None = None
    ranges: frozenset[int] = frozenset()
    moved: Set[int] = frozenset()

    def concerns(self, key: ChunkKey) -> bool:
        """Whether what the master says of ``key`` counts."""
        return not self.moved or range_of(key) not in self.moved


@dataclass(slots=True)
class HandedOver:
    """What waits to be told of some ranges, on its way from one queue to another; see ReportQueue for the fields."""

    added: dict[ChunkKey, Holding] = field(default_factory=dict)
    patient: dict[ChunkKey, Holding] = field(default_factory=dict)
    unconfirmed: dict[ChunkKey, int] = field(default_factory=dict)
    removed: dict[Removal, None] = field(default_factory=dict)
    deleted: dict[Removal, None] = field(default_factory=dict)
    retracted: list[Removal] = field(default_factory=list)
    flushes: list[Flush] = field(default_factory=list)
    owes_report: bool = False


class Flush:
    """Waits until all masters know what was removed before it began: ``done`` is called then.

    ``queues`` are those that have not told it yet.
    """

    def __init__(self, done: Callable[[], None]) -> None:
        self.queues: set[ReportQueue] = set()
        self._done = done

    def told(self, queue: ReportQueue) -> None:
        """``queue`` has told what it had, or has handed it over."""
        self.queues.discard(queue)
        if not self.queues:
            self._done()


class ReportQueue:
    """Collects additions and removals; ``take`` makes a message, ``done`` or ``requeue`` ends it.

    ``ranges`` are those of its master.
    """

    def __init__(self, ranges: frozenset[int] = ALL_RANGES) -> None:
        self.ranges = ranges
        self._added: dict[ChunkKey, Holding] = {}
        self._patient: dict[ChunkKey, Holding] = {}  # added, and nobody waits for it
        self._parked: dict[ChunkKey, Holding] = {}  # added, and the master does not know their slots yet
        self._unconfirmed: dict[ChunkKey, int] = {}  # the versions of puts that no master has accepted
        self._removed: dict[Removal, None] = {}
        self._deleted: dict[Removal, None] = {}
        self._retracted: list[Removal] = []
        self._report: SlotReport | None = None
        self._unreported: set[int] = set()  # ranges that a report has to begin for
        self._granted_keys = 0
        self._known = known_below(0)  # slots of each range that the master knows
        self._flushes: list[Flush] = []  # to be told by the next message
        self._flushing: list[Flush] = []  # with the message under way, or one behind it
        self._owes_report = False  # removals were dropped that no report stands for yet
        self._stands_for_removals = False  # the report under way says what such removals did not
        self._under_way: ReportMessage | None = None

    def add(self, chunk: Holding, *, patient: bool = False, unconfirmed: bool = False) -> None:
        """The node holds ``chunk`` now; ``patient``: the master has heard of it, so no message leaves for it alone.

        ``unconfirmed``: no master has accepted this put. What is told again because it has moved to another tier
        stays as it was.
        """
        key, version = chunk.key, chunk.version
        if unconfirmed:
            self._unconfirmed[key] = version
        elif patient:
            self._unconfirmed.pop(key, None)
        if self._removed:
            self._removed.pop(Removal(key, version), None)
        for added in filter(None, (self._added, self._patient, self._parked)):
            added.pop(key, None)
        (self._added, self._patient)[patient][key] = chunk

    def remove(self, chunk: Holding, *, deleted: bool = False) -> None:
        """The node holds it no longer: ``deleted`` on a client's order, or evicted, expired, corrupt."""
        self.forget(chunk)
        (self._deleted if deleted else self._removed)[Removal(chunk.key, chunk.version)] = None
        if len(self._removed) > MAX_QUEUED_REMOVALS:
            self._removed.clear()
            self._owes_report = True
        if len(self._deleted) > MAX_QUEUED_REMOVALS:  # the oldest are evictions now: copies elsewhere may come back
            del self._deleted[next(iter(self._deleted))]
            self._owes_report = True

    def retract(self, key: ChunkKey, version: int) -> None:
        """Take back what a client may have told the master of a put that failed here."""
        if len(self._retracted) < MAX_RETRACTED:
            self._retracted.append(Removal(key, version))

    def again(self, chunk: Holding) -> None:
        """The master could not yet tell whether ``chunk`` stands: it is told once more, with the next message."""
        if not chunk.held or chunk.key in self._added or chunk.key in self._patient:
            return
        (self._patient if self._is_known(chunk.key) else self._parked)[chunk.key] = chunk

    def _is_known(self, key: ChunkKey) -> bool:
        number, slot = divmod(slot_of(key), RANGE_SLOTS)
        return slot < self._known[number]

    def forget(self, chunk: Holding) -> None:
        """The master does not want ``chunk``: there is nothing to add, and nothing to remove there."""
        for added in (self._added, self._patient, self._parked):
            if added.get(chunk.key) is chunk:
                del added[chunk.key]
        if self._unconfirmed.get(chunk.key) == chunk.version:
            del self._unconfirmed[chunk.key]

    def accepted(self, chunk: Holding) -> None:
        """The master has accepted ``chunk``."""
        if self._unconfirmed.get(chunk.key) == chunk.version:
            del self._unconfirmed[chunk.key]

    def is_unconfirmed(self, chunk: Holding) -> bool:
        """Whether no master has accepted ``chunk``."""
        return self._unconfirmed.get(chunk.key) == chunk.version

    def is_pending(self, chunk: Holding) -> bool:
        """Whether the master has not yet confirmed ``chunk``."""
        key, under_way = chunk.key, self._under_way
        if chunk in (self._added.get(key), self._patient.get(key), self._parked.get(key)):
            return True
        return under_way is not None and chunk in under_way.added and under_way.concerns(key)

    def is_version_pending(self, chunk: Holding) -> bool:
        """The same of ``chunk``, or of what holds its bytes in another tier."""
        held = [queue.get(chunk.key) for queue in (self._added, self._patient, self._parked)]
        return self.is_pending(chunk) or any(each is not None and each.version == chunk.version for each in held)

    def hasten(self, chunk: Holding) -> None:
        """Somebody waits for the master's answer on ``chunk`` now: it is told without delay."""
        if self._patient.get(chunk.key) is chunk:
            self._added[chunk.key] = self._patient.pop(chunk.key)

    # --- ranges that change hands

    def hand_over(self, numbers: frozenset[int]) -> HandedOver:
        """Take out what waits to be told of these ranges; what their master has yet to answer counts as not told."""
        untold, message = HandedOver(owes_report=self._owes_report or self._stands_for_removals), self._under_way
        untold.added = _take_of(self._added, numbers)
        untold.patient = _take_of(self._patient, numbers) | _take_of(self._parked, numbers)
        untold.unconfirmed = _take_of(self._unconfirmed, numbers)
        untold.deleted = _take_removals(self._deleted, numbers)
        if len(self._removed) > MAX_MOVED_REMOVALS:  # what the report of these ranges does not name is gone
            untold.owes_report = True
        else:
            untold.removed = _take_removals(self._removed, numbers)
        untold.retracted = [each for each in self._retracted if range_of(each[0]) in numbers]
        self._retracted = [each for each in self._retracted if range_of(each[0]) not in numbers]
        untold.flushes = self._flushes + self._flushing
        if message is not None:
            self._take_back(message, numbers, untold)
        self.ranges -= numbers
        self._unreported -= numbers
        if self._report is not None:
            self._report.drop(numbers)
            self._end_report_if_over()
        return untold

    def _take_back(self, message: ReportMessage, numbers: frozenset[int], untold: HandedOver) -> None:
        for chunk in message.added:
            key = chunk.key
            if chunk.held and message.concerns(key) and range_of(key) in numbers and key not in untold.patient:
                untold.added.setdefault(key, chunk)
        for removals, told in ((untold.removed, message.removed), (untold.deleted, message.deleted)):
            removals |= {each: None for each in told if message.concerns(each[0]) and range_of(each[0]) in numbers}
        message.moved = message.moved | numbers

    def take_over(self, untold: HandedOver, numbers: frozenset[int]) -> None:
        """Tell from now on what is to be told of these ranges, first of all what is held there."""
        self.ranges |= numbers
        self._added.update(untold.added)
        self._patient.update(untold.patient)
        self._unconfirmed.update(untold.unconfirmed)
        self._removed.update(untold.removed)
        self._deleted.update(untold.deleted)
        self._retracted = (self._retracted + untold.retracted)[:MAX_RETRACTED]
        self._owes_report = self._owes_report or untold.owes_report
        for flush in untold.flushes:
            self.forget_flush(flush)  # the message under way here does not tell what it waits for now
            self._flushes.append(flush)
            flush.queues.add(self)
        self._known = bytes(0 if number in numbers else known for number, known in enumerate(self._known))
        self.want_report(numbers)

    # --- flushes

    def flush(self, flush: Flush) -> None:
        """Have ``flush`` wait for what is to be told of removals here, if there is any."""
        message = self._under_way
        if not self.removals_told or (message is not None and (message.removed or message.deleted)):
            flush.queues.add(self)
            self._flushes.append(flush)

    def forget_flushes(self) -> None:
        """Take note that what flushes wait for is another queue's."""
        flushes, self._flushes, self._flushing = self._flushes + self._flushing, [], []
        for flush in flushes:
            flush.told(self)

    def forget_flush(self, flush: Flush) -> None:
        """Take note that nobody waits for ``flush`` any more."""
        self._flushes = [each for each in self._flushes if each is not flush]
        self._flushing = [each for each in self._flushing if each is not flush]

    # --- reports

    def want_report(self, numbers: Iterable[int]) -> None:
        """The master has to be told all of these ranges; a report that is under way may do that already."""
        covered = frozenset[int]() if self._report is None else self._report.ranges
        self._unreported.update(self.ranges.intersection(numbers) - covered)

    def want_whole_report(self) -> None:
        """The master has to be told everything, from the beginning."""
        self._report, self._unreported = None, set(self.ranges)

    def begin_report(
        self,
        report_id: int,
        chunks: SortedChunks,
        is_reported: Callable[[Holding], bool],
        deleted: Iterable[Removal] = (),
    ) -> None:
        """Tell all of the ranges that wait for a report, or of all if one is to stand for removals.

        ``is_reported`` selects the chunks that belong in the report; unconfirmed ones are announced like new ones. The
        last removals by clients, ``deleted``, are repeated so that a new master does not admit copies of those chunks.
        """
        unconfirmed = self._unconfirmed

        def is_told_here(chunk: Holding) -> bool:
            return is_reported(chunk) and unconfirmed.get(chunk.key) != chunk.version

        numbers = self.ranges if self._owes_report else frozenset(self._unreported)
        self._unreported = set()
        self._deleted.update((each, None) for each in deleted if range_of(each[0]) in numbers)
        self._report = SlotReport(report_id, chunks, is_told_here, numbers)
        self._stands_for_removals |= self._owes_report
        self._owes_report = False
        self._granted_keys = 0
        self._known = bytes(0 if number in numbers else known for number, known in enumerate(self._known))
        self._patient.update(self._parked)  # this may be another master
        self._parked.clear()

    @property
    def report_wanted(self) -> bool:
        """Whether a report must begin: of ranges that have another owner, or since too many removals waited."""
        return (self._owes_report or bool(self._unreported)) and self._report is None

    @property
    def is_reporting(self) -> bool:
        """Whether a report is under way, or must begin."""
        return self._report is not None or bool(self._unreported)

    @property
    def is_unsorted(self) -> bool:
        """Whether a report has yet to be sorted."""
        return self._report is not None and not self._report.is_sorted

    def sort_report(self, num_chunks: int) -> None:
        """Prepare a report, ``num_chunks`` chunks further."""
        if self._report is not None:
            self._report.chunks.sort(num_chunks)

    def granted(self, num_keys: int, known: bytes) -> None:
        """The master takes ``num_keys`` keys in the next piece of the report, and knows so many slots of each range."""
        self._granted_keys = num_keys
        if known == self._known:
            return
        self._known = known
        for key in [key for key in self._parked if self._is_known(key)]:
            self._patient[key] = self._parked.pop(key)

    @property
    def _may_report(self) -> bool:
        return self._report is not None and self._report.is_sorted and self._granted_keys > 0

    @property
    def waits_for_master(self) -> bool:
        """Whether the master's next answer may bring something on: a grant, or slots that it knows."""
        return self._report is not None or bool(self._parked)

    # --- messages

    @property
    def urgent(self) -> bool:
        """Whether somebody waits: an addition, a flush, or a report that may go on."""
        return bool(self._added or self._flushes or self._flushing) or self._may_report

    @property
    def removals_told(self) -> bool:
        """Whether no removal waits for the next message, or for a report in its place."""
        return not (self._removed or self._deleted or self._owes_report or self._stands_for_removals)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not (self._added or self._patient or self._removed or self._deleted or self._retracted)

    def take(self) -> ReportMessage:
        """The next message; possibly empty (a sign of life)."""
        assert self._under_way is None, "one message at a time"
        message = ReportMessage(
            removed=_take_keys(self._removed, MAX_REMOVED),
            deleted=_take_keys(self._deleted, MAX_REMOVED),
            retracted=self._retracted,
        )
        self._retracted = []
        message.added = _take_some(self._added, MAX_ANNOUNCED)
        message.added += _take_some(self._patient, MAX_ANNOUNCED - len(message.added))
        message.unconfirmed = [self._unconfirmed.get(chunk.key) == chunk.version for chunk in message.added]
        report = self._report
        if report is not None:
            message.report_id, message.ranges = report.report_id, report.ranges
            if self._may_report:
                message.piece = report.take(self._granted_keys)
        self._flushing += self._flushes
        self._flushes = []
        self._under_way = message
        return message

    def done(self) -> None:
        """The message under way was answered."""
        message, self._under_way = self._under_way, None
        assert message is not None, "no message is under way"
        report = self._report
        if message.piece is not None and report is not None and report.report_id == message.report_id:
            report.done()  # else the piece was of a report that was given up meanwhile
            self._end_report_if_over()
        if self.removals_told:
            flushes, self._flushing = self._flushing, []
            for flush in flushes:
                flush.told(self)

    def _end_report_if_over(self) -> None:
        if self._report is not None and self._report.is_over:
            self._report = None
            self._stands_for_removals = False

    def requeue(self) -> None:
        """The message under way may not have arrived: its contents are to be told again, unless they are outdated."""
        message = self._under_way
        assert message is not None, "no message is under way"
        self._under_way = None
        self._granted_keys = 0
        self._retracted.clear()
        for chunk in message.added:
            if chunk.held and message.concerns(chunk.key) and chunk.key not in self._patient:
                self._added.setdefault(chunk.key, chunk)
        self._removed.update({each: None for each in message.removed if message.concerns(each[0])})
        self._deleted.update({each: None for each in message.deleted if message.concerns(each[0])})

    def check(self) -> None:
        """Assert that only chunks that are still there wait to be reported, and only those of the master's ranges."""
        assert not self._added.keys() & self._patient.keys()
        assert not self._parked.keys() & (self._added.keys() | self._patient.keys())
        assert len(self._retracted) <= MAX_RETRACTED
        assert len(self._removed) <= MAX_QUEUED_REMOVALS + MAX_REMOVED
        for key, chunk in (*self._added.items(), *self._patient.items(), *self._parked.items()):
            assert chunk.key == key
            assert chunk.held, f"{chunk!r} waits to be reported"
            assert range_of(key) in self.ranges
        assert self._unreported <= self.ranges
        assert self._report is None or self._report.ranges <= self.ranges
        assert all(self in flush.queues for flush in (*self._flushes, *self._flushing))

    def __repr__(self) -> str:
        num_added = len(self._added) + len(self._patient) + len(self._parked)
        return f"ReportQueue(+{num_added} -{len(self._removed) + len(self._deleted)})"


def _take_some(pending: dict[ChunkKey, Holding], limit: int) -> list[Holding]:
    if len(pending) <= limit:
        taken = list(pending.values())
        pending.clear()
        return taken
    return [pending.pop(key) for key in list(pending)[:limit]]


def _take_keys(pending: dict[Removal, None], limit: int) -> list[Removal]:
    taken = list(pending)[:limit]
    for key in taken:
        del pending[key]
    return taken


_V = TypeVar("_V")


def _take_of(pending: dict[ChunkKey, _V], numbers: frozenset[int]) -> dict[ChunkKey, _V]:
    return {key: pending.pop(key) for key in [key for key in pending if range_of(key) in numbers]}


def _take_removals(pending: dict[Removal, None], numbers: frozenset[int]) -> dict[Removal, None]:
    return {each: pending.pop(each) for each in [each for each in pending if range_of(each[0]) in numbers]}
