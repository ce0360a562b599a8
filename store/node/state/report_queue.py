"""What the master still has to be told: pure bookkeeping between the node's decisions and the reporter.

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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from tanghulu.errors import TanghuluError
from tanghulu.store.node.state.confirmations import Confirmations, Done
from tanghulu.store.node.state.holdings import Holding
from tanghulu.store.node.state.slot_report import SlotPiece, SlotReport
from tanghulu.store.protocol.key_slots import slot_of
from tanghulu.types import ChunkKey

MAX_ADDED = 4096
MAX_REMOVED = 4096
#: Retractions told in one message, and those that are remembered.
MAX_RETRACTED = 4096
#: Removals that wait for a master, some 100 bytes each.
MAX_QUEUED_REMOVALS = 1 << 18

#: A key and the version of the put that is gone.
Removal: TypeAlias = tuple[ChunkKey, int]


@dataclass(slots=True)
class ReportMessage:
    """One message to the master; ``unconfirmed`` says of each of ``added`` whether no master has accepted it yet.

    ``report_id`` is of the report that is under way, if one is, and ``piece`` a piece of it.
    """

    added: list[Holding] = field(default_factory=list)
    unconfirmed: list[bool] = field(default_factory=list)
    removed: list[Removal] = field(default_factory=list)
    deleted: list[Removal] = field(default_factory=list)
    retracted: list[Removal] = field(default_factory=list)
    report_id: int = 0
    piece: SlotPiece | None = None


class ReportQueue:
    """Collects additions and removals; ``take`` makes a message, ``done`` or ``requeue`` ends it.

    Knows who waits for the master's answer on a chunk: ``confirm`` begins the wait, ``settle`` or ``expire`` ends it.
    """

    def __init__(self) -> None:
        self._confirmations = Confirmations()
        self._added: dict[ChunkKey, Holding] = {}
        self._patient: dict[ChunkKey, Holding] = {}  # added, and nobody waits for it
        self._parked: dict[ChunkKey, Holding] = {}  # added, and the master does not know their slots yet
        self._unconfirmed: dict[ChunkKey, int] = {}  # the versions of puts that no master has accepted
        self._removed: dict[Removal, None] = {}
        self._deleted: dict[Removal, None] = {}
        self._retracted: list[Removal] = []
        self._void: dict[Removal, None] = {}  # the last that were retracted
        self._report: SlotReport | None = None
        self._granted_keys = 0
        self._num_known_slots = 0
        self._num_reports = 0
        self._owes_report = False  # removals were dropped that no report stands for yet
        self._stands_for_removals = False  # the report under way says what such removals did not
        self._under_way: ReportMessage | None = None

    def add(self, chunk: Holding, *, patient: bool = False, unconfirmed: bool = False) -> None:
        """The node holds ``chunk`` now; ``patient``: the master has heard of it, so no message leaves for it alone.

        ``unconfirmed``: no master has accepted this put. What is told again because it has moved to another tier
        stays as it was.
        """
        if unconfirmed:
            self._unconfirmed[chunk.key] = chunk.version
        elif patient:
            self._unconfirmed.pop(chunk.key, None)
        self._removed.pop((chunk.key, chunk.version), None)
        for added in (self._added, self._patient, self._parked):
            added.pop(chunk.key, None)
        (self._added, self._patient)[patient][chunk.key] = chunk

    def remove(self, chunk: Holding, *, deleted: bool = False) -> None:
        """The node holds it no longer: ``deleted`` on a client's order, or evicted, expired, corrupt."""
        self.forget(chunk)
        (self._deleted if deleted else self._removed)[chunk.key, chunk.version] = None
        if len(self._removed) > MAX_QUEUED_REMOVALS:
            self._removed.clear()
            self._owes_report = True
        if len(self._deleted) > MAX_QUEUED_REMOVALS:  # the oldest are evictions now: copies elsewhere may come back
            del self._deleted[next(iter(self._deleted))]
            self._owes_report = True

    def retract(self, key: ChunkKey, version: int) -> None:
        """Take back what a client may have told the master of a put that failed here."""
        if len(self._retracted) < MAX_RETRACTED:
            self._retracted.append((key, version))
            self._void[key, version] = None
            if len(self._void) > MAX_RETRACTED:
                del self._void[next(iter(self._void))]

    def has_retracted(self, key: ChunkKey, version: int) -> bool:
        """Whether an earlier try of this put was retracted: the master's word on it means nothing."""
        return (key, version) in self._void

    def again(self, chunk: Holding) -> None:
        """The master could not yet tell whether ``chunk`` stands: it is told once more, with the next message."""
        if not chunk.held or chunk.key in self._added or chunk.key in self._patient:
            return
        is_known = slot_of(chunk.key) < self._num_known_slots
        (self._patient if is_known else self._parked)[chunk.key] = chunk

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
        under_way = self._under_way
        waits = any(added.get(chunk.key) is chunk for added in (self._added, self._patient, self._parked))
        return waits or (under_way is not None and chunk in under_way.added)

    # --- who waits for the master's answer

    def confirm(self, chunks: Sequence[Holding], until_s: float, done: Done) -> bool:
        """Call ``done`` with the master's answer on each of ``chunks``; returns whether any has yet to be reported.

        See Confirmations; those that nobody waited for so far are reported without delay from now on.
        """
        pending = [chunk for chunk in chunks if self.is_pending(chunk)]
        self._confirmations.expect(chunks, pending, until_s, done)
        for chunk in pending:
            if self._patient.get(chunk.key) is chunk:
                self._added[chunk.key] = self._patient.pop(chunk.key)
        return bool(pending)

    def settle(self, chunk: Holding, stands: bool) -> None:
        """Tell the putters that wait for the master's answer on ``chunk`` whether it ``stands``."""
        self._confirmations.settle(chunk, stands)

    def expire(self, now_s: float, error: TanghuluError) -> list[Holding]:
        """End waits that lasted long enough with ``error``; returns the chunks that nobody waits for any more."""
        return self._confirmations.expire(now_s, error)

    @property
    def next_expiry_s(self) -> float | None:
        """When the first wait has lasted long enough."""
        return self._confirmations.next_s

    # --- reports

    def begin_report(self, chunks: list[Holding], is_reported: Callable[[Holding], bool]) -> None:
        """Tell everything again; a report that was under way is given up. ``chunks`` is the report's from now on.

        ``is_reported`` says of a chunk whether it is to be told still; unconfirmed ones are told as new ones are.
        """
        unconfirmed = self._unconfirmed
        self._num_reports += 1

        def is_told_here(chunk: Holding) -> bool:
            return is_reported(chunk) and unconfirmed.get(chunk.key) != chunk.version

        self._report = SlotReport(self._num_reports, chunks, is_told_here)
        self._stands_for_removals |= self._owes_report
        self._owes_report = False
        self._granted_keys = 0
        self._num_known_slots = 0
        self._patient.update(self._parked)  # this may be another master
        self._parked.clear()

    @property
    def report_wanted(self) -> bool:
        """Whether a report must say what removals did not: too many waited."""
        return self._owes_report and self._report is None

    @property
    def is_reporting(self) -> bool:
        """Whether a report is under way."""
        return self._report is not None

    @property
    def is_unsorted(self) -> bool:
        """Whether a report has yet to be sorted."""
        return self._report is not None and not self._report.is_sorted

    def sort_report(self, num_chunks: int) -> None:
        """Prepare a report, ``num_chunks`` chunks further."""
        if self._report is not None:
            self._report.sort(num_chunks)

    def granted(self, num_keys: int, num_known_slots: int) -> None:
        """The master takes ``num_keys`` keys in the next piece of the report, and knows ``num_known_slots``."""
        self._granted_keys = num_keys
        if num_known_slots == self._num_known_slots:
            return
        self._num_known_slots = num_known_slots
        for key in [key for key in self._parked if slot_of(key) < num_known_slots]:
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
        """Whether somebody waits: an addition, or a report that may go on."""
        return bool(self._added) or self._may_report

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
        message.added = _take_some(self._added, MAX_ADDED)
        message.added += _take_some(self._patient, MAX_ADDED - len(message.added))
        message.unconfirmed = [self._unconfirmed.get(chunk.key) == chunk.version for chunk in message.added]
        report = self._report
        if report is not None:
            message.report_id = report.report_id
            if self._may_report:
                message.piece = report.take(self._granted_keys)
        self._under_way = message
        return message

    def done(self) -> None:
        """The message under way was answered."""
        message, self._under_way = self._under_way, None
        assert message is not None, "no message is under way"
        report = self._report
        if message.piece is None or report is None or report.report_id != message.report_id:
            return  # the piece was of a report that was given up meanwhile
        report.done()
        if report.is_over:
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
            if chunk.held and chunk.key not in self._patient:
                self._added.setdefault(chunk.key, chunk)
        self._removed.update(dict.fromkeys(message.removed))
        self._deleted.update(dict.fromkeys(message.deleted))

    def check(self) -> None:
        """Assert that only chunks that are still there wait to be reported, and that the waiting puts are counted."""
        self._confirmations.check()
        assert not self._added.keys() & self._patient.keys()
        assert not self._parked.keys() & (self._added.keys() | self._patient.keys())
        assert len(self._retracted) <= MAX_RETRACTED
        assert len(self._void) <= MAX_RETRACTED
        assert len(self._removed) <= MAX_QUEUED_REMOVALS + MAX_REMOVED
        for key, chunk in (*self._added.items(), *self._patient.items(), *self._parked.items()):
            assert chunk.key == key
            assert chunk.held, f"{chunk!r} waits to be reported"

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
