"""What the master still has to be told: pure bookkeeping between the node's decisions and the reporter.

One message is under way at a time; what comes up meanwhile goes into the next one together, so concurrent puts share a
message. The master applies a message's removals before its additions. So for each key the last thing that happened
is enough: a key that was added and removed before the message left is only removed; one that was removed and added is
both. A message that failed is put back *behind* what happened since, by the same rule.

Puts that ended before they were whole are retracted, in case that their clients have committed them at the master. That
is told once: what a lost message said is left to the master's patience, since it might meet a second try of the same
put.

A report (everything the node holds) is cut into pieces that ride on the messages, one each, until it is complete.

Example: put a, put b -> take() gives added=[a, b]. Under way: evict a, put c. The message fails: requeue. take() now
gives removed=[a], added=[b, c].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from tanghulu.errors import TanghuluError
from tanghulu.store.node.state.confirmations import Confirmations, Done
from tanghulu.store.node.state.holdings import Holding
from tanghulu.types import ChunkKey

MAX_ADDED = 4096
MAX_REMOVED = 4096
#: Retractions told in one message, and those that are remembered.
MAX_RETRACTED = 4096


class FullReport(Enum):
    """Which part of a report a message carries."""

    NONE = "none"
    BEGIN = "begin"
    PIECE = "piece"
    END = "end"

    __hash__ = object.__hash__  # see Pin


@dataclass(slots=True)
class ReportMessage:
    """One message to the master. ``added`` holds new chunks and, in a report, old ones."""

    added: list[Holding] = field(default_factory=list)
    removed: list[ChunkKey] = field(default_factory=list)
    deleted: list[ChunkKey] = field(default_factory=list)
    retracted: list[tuple[ChunkKey, int]] = field(default_factory=list)
    report: FullReport = FullReport.NONE

    @property
    def empty(self) -> bool:
        """Whether there is nothing to say."""
        told = self.added or self.removed or self.deleted or self.retracted
        return not told and self.report is FullReport.NONE


class ReportQueue:
    """Collects additions and removals; ``take`` makes a message, ``done`` or ``requeue`` ends it.

    Knows who waits for the master's answer on a chunk: ``confirm`` begins the wait, ``settle`` or ``expire`` ends it.
    """

    def __init__(self) -> None:
        self._confirmations = Confirmations()
        self._added: dict[ChunkKey, Holding] = {}
        self._patient: dict[ChunkKey, Holding] = {}  # added, and nobody waits for it
        self._removed: dict[ChunkKey, None] = {}
        self._deleted: dict[ChunkKey, None] = {}
        self._retracted: list[tuple[ChunkKey, int]] = []
        self._void: dict[tuple[ChunkKey, int], None] = {}  # the last that were retracted
        self._report: list[Holding] | None = None
        self._report_begun = False
        self._under_way: ReportMessage | None = None

    def add(self, chunk: Holding, *, patient: bool = False) -> None:
        """The node holds ``chunk`` now; ``patient``: the master has heard of it, so no message leaves for it alone."""
        (self._added, self._patient)[not patient].pop(chunk.key, None)
        (self._added, self._patient)[patient][chunk.key] = chunk

    def remove(self, chunk: Holding, *, deleted: bool = False) -> None:
        """The node holds it no longer: ``deleted`` on a client's order, or evicted, expired, corrupt."""
        self.forget(chunk)
        (self._deleted if deleted else self._removed)[chunk.key] = None

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
        if chunk.held and chunk.key not in self._added and chunk.key not in self._patient:
            self._patient[chunk.key] = chunk

    def forget(self, chunk: Holding) -> None:
        """The master does not want ``chunk``: there is nothing to add, and nothing to remove there."""
        for added in (self._added, self._patient):
            if added.get(chunk.key) is chunk:
                del added[chunk.key]

    def is_pending(self, chunk: Holding) -> bool:
        """Whether the master has not yet confirmed ``chunk``."""
        under_way = self._under_way
        waits = self._added.get(chunk.key) is chunk or self._patient.get(chunk.key) is chunk
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

    # --- messages

    def begin_report(self, chunks: list[Holding]) -> None:
        """Tell everything again; a report that was under way starts over."""
        self._report = chunks
        self._report_begun = False

    @property
    def urgent(self) -> bool:
        """Whether somebody waits: an addition, or a report."""
        return bool(self._added) or self._report is not None

    @property
    def removals_told(self) -> bool:
        """Whether no removal waits for the next message."""
        return not (self._removed or self._deleted)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to tell."""
        told = self._added or self._patient or self._removed or self._deleted or self._retracted
        return not told and self._report is None

    def take(self) -> ReportMessage:
        """The next message; possibly empty (a sign of life)."""
        assert self._under_way is None, "one message at a time"
        message = ReportMessage(
            removed=_take_keys(self._removed, MAX_REMOVED),
            deleted=_take_keys(self._deleted, MAX_REMOVED),
            retracted=self._retracted,
        )
        self._retracted = []
        if not (self._removed or self._deleted):  # an addition must not overtake the removal of its key
            message.added = _take_some(self._added, MAX_ADDED)
            message.added += _take_some(self._patient, MAX_ADDED - len(message.added))
        if self._report is not None:
            self._add_report_piece(message, self._report)
        self._under_way = message
        return message

    def _add_report_piece(self, message: ReportMessage, rest: list[Holding]) -> None:
        # A report of one message has a BEGIN and an empty END, so the master needs no third case.
        if not self._report_begun:
            self._report_begun = True
            message.report = FullReport.BEGIN
        else:
            message.report = FullReport.PIECE if rest else FullReport.END
        piece, self._report = rest[:MAX_ADDED], rest[MAX_ADDED:]
        fresh = set(message.added)
        message.added += [c for c in piece if c.is_live and c not in fresh]
        if message.report is FullReport.END:
            self._report = None

    def done(self) -> None:
        """The message under way was answered."""
        self._under_way = None

    def requeue(self) -> bool:
        """The message under way may not have arrived: its contents are to be told again, unless they are outdated.

        Returns whether it was part of a report, which then has to begin again.
        """
        message = self._under_way
        assert message is not None, "no message is under way"
        self._under_way = None
        self._retracted.clear()
        for chunk in message.added:
            if chunk.held and chunk.key not in self._patient:
                self._added.setdefault(chunk.key, chunk)
        self._removed.update(dict.fromkeys(message.removed))
        self._deleted.update(dict.fromkeys(message.deleted))
        return message.report is not FullReport.NONE

    def check(self) -> None:
        """Assert that only chunks that are still there wait to be reported, and that the waiting puts are counted."""
        self._confirmations.check()
        assert not self._added.keys() & self._patient.keys()
        assert len(self._retracted) <= MAX_RETRACTED
        assert len(self._void) <= MAX_RETRACTED
        for key, chunk in (*self._added.items(), *self._patient.items()):
            assert chunk.key == key
            assert chunk.held, f"{chunk!r} waits to be reported"

    def __repr__(self) -> str:
        return f"ReportQueue(+{len(self._added) + len(self._patient)} -{len(self._removed) + len(self._deleted)})"


def _take_some(pending: dict[ChunkKey, Holding], limit: int) -> list[Holding]:
    if len(pending) <= limit:
        taken = list(pending.values())
        pending.clear()
        return taken
    return [pending.pop(key) for key in list(pending)[:limit]]


def _take_keys(pending: dict[ChunkKey, None], limit: int) -> list[ChunkKey]:
    taken = list(pending)[:limit]
    for key in taken:
        del pending[key]
    return taken
