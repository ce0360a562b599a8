"""Puts by way of a desk: the value goes into memory of the node, and only the master is asked.

The layout is that of ``store.protocol.write_buffer``.

    value and checksum into the desk -> PROCLAIM to the master -> accepted: publish the record -> done

In this order a record is never published that the master did not accept, so the node may make a chunk of it whenever it
comes by. Whatever is not as usual goes the other way, to the node: the master does not lead, or is rebuilding, or
knows the key as the node's own; the node has not shown a sign of life; there is no desk, or no room in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tanghulu.errors import TanghuluError
from tanghulu.store.client.logic import messages
from tanghulu.store.client.logic.commit import Question
from tanghulu.store.client.logic.effects import MASTER, Ask, Deadline, Logic, PeerId
from tanghulu.store.client.logic.link import Link
from tanghulu.store.protocol import write_buffer as desks
from tanghulu.store.protocol.checksums import compute
from tanghulu.store.protocol.shared_index import IndexReader
from tanghulu.store.protocol.types import RELIED_S, NewChunk, Pin, Verdict
from tanghulu.store.protocol.write_buffer import DeskPlace, DeskWriter, Record

if TYPE_CHECKING:
    from tanghulu.store.client.logic.context import Context

#: Larger values are written under a reservation of their own.
MAX_DESK_VALUE = 1 << 20
#: A desk is asked for when two puts come within so long.
OFTEN_S = 1.0
#: A node that had none to give is not asked again for so long, unless for smaller values.
REFUSED_S = 0.1
_MAX_TTL_S = 1e6
#: So much of a new desk is mapped at once, for the small values that will lie there.
TOUCHED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Mapped:
    """A node of this host whose memory is mapped, and which of its lives that is."""

    link: Link
    index: IndexReader
    generation: int

    def alive(self, now_s: float) -> bool:
        """Whether the node has shown itself of late, and has not hung up."""
        return self.index.is_kept(now_s) and self.link.remote.alive


class ClientDesks:
    """The desks of one client. Safe from any thread: every step is one operation of a dict."""

    def __init__(self) -> None:
        self._mapped: dict[PeerId, Mapped] = {}
        self._open: dict[PeerId, DeskWriter] = {}
        self._last_s: dict[PeerId, float] = {}
        self._refused: dict[PeerId, tuple[float, int]] = {}  # until when, for values from how many bytes on

    def map(self, node: PeerId, mapped: Mapped) -> None:
        """The node's memory is here."""
        self._mapped[node] = mapped

    def mapped(self, node: PeerId) -> Mapped | None:
        """The node, if its memory is here."""
        return self._mapped.get(node)

    def get(self, node: PeerId) -> DeskWriter | None:
        """The desk at ``node``."""
        return self._open.get(node)

    def leave(self, node: PeerId, writer: DeskWriter) -> None:
        """The desk is spent, or the node wants it back."""
        if self._open.get(node) is writer:
            self._open.pop(node, None)
        writer.leave()

    def forget(self, node: PeerId) -> None:
        """The node's memory is not mapped any more, or another process took its place."""
        self._mapped.pop(node, None)
        writer = self._open.pop(node, None)
        if writer is not None:
            writer.leave()

    def close(self) -> None:
        """The client is closed: leave all desks."""
        for node in list(self._mapped):
            self.forget(node)

    def may_ask(self, node: PeerId, size_bytes: int, now_s: float, *, often: bool) -> bool:
        """Whether a desk for values of that size is worth a call now; counts as one that is made.

        ``often``: this put alone has several.
        """
        last_s, self._last_s[node] = self._last_s.get(node, float("-inf")), now_s
        until_s, least_bytes = self._refused.get(node, (0.0, 0))
        if (now_s - last_s > OFTEN_S and not often) or (now_s < until_s and size_bytes >= least_bytes):
            return False
        self._refused[node] = now_s + REFUSED_S, 0  # nobody else asks meanwhile
        return True

    def refused(self, node: PeerId, size_bytes: int, now_s: float) -> None:
        """The node has none for values of that size."""
        self._refused[node] = now_s + REFUSED_S, size_bytes

    def open(self, node: PeerId, mapped: Mapped, place: DeskPlace) -> DeskWriter | None:
        """The node has given a desk; None if that is not inside its memory."""
        view = mapped.link.view
        if view is None or place.end > len(view):
            return None
        mapped.link.remote.touch(place.offset, min(place.length, TOUCHED_BYTES))
        before, writer = self._open.get(node), DeskWriter(view, place)
        self._open[node] = writer
        self._refused.pop(node, None)
        if before is not None:
            before.leave()
        return writer


def suits(new: NewChunk, part_bytes: int) -> bool:
    """Whether a desk's record can say all of ``new``; ``part_bytes``: of its checksums, if it has none yet."""
    key, sums = new.key, new.checksums
    return (
        new.size_bytes <= MAX_DESK_VALUE
        and new.replicas == 1
        and new.pin is not Pin.HARD
        and len(sums.parts) <= 1
        and not (sums.part_bytes or part_bytes)
        and (new.ttl_s is None or new.ttl_s < _MAX_TTL_S)
        and (len(key) <= desks.MAX_KEY_BYTES // 4 or len(key.encode()) <= desks.MAX_KEY_BYTES)
    )


def put(context: Context, deadline: Deadline, node: PeerId, new: NewChunk, value: memoryview) -> Logic[bool | None]:
    """Put ``new`` at ``node``: whether it existed; None: put it to the node itself."""
    mapped = context.desks.mapped(node)
    if mapped is None:
        return None
    writer, place = yield from _begin(context, node, mapped, new.size_bytes)
    if writer is None:
        return None
    published = False
    try:
        mapped.link.remote.touch(writer.offset + place, new.size_bytes)
        writer.fill(place, value)
        (checksum,) = new.checksums.parts or compute(value).parts
        (verdict,) = yield from _proclaim(context, deadline, node, mapped, (new,))
        if verdict is Verdict.ACCEPTED:
            writer.publish(_record(new, place, checksum))
            published = True
            return False
    finally:
        if not published:
            writer.abandon(place, new.size_bytes)
    if verdict is Verdict.EXISTS:
        return True
    if mapped.index.find(new.key, context.clock.now_s()) is not None:
        context.reads.note(node, new.key, 0)  # a hit counts for the order of evictions
        return True
    return None


@dataclass(slots=True)
class _Use:
    """One value of a put of many in a desk."""

    index: int
    new: NewChunk
    writer: DeskWriter
    place: int
    checksum: int = 0
    published: bool = False


def put_many(
    context: Context, deadline: Deadline, node: PeerId, items: Sequence[tuple[NewChunk, memoryview]]
) -> Logic[list[bool | None]]:
    """``put`` for several values, which share a proclamation; as many of the first as there is room for at desks."""
    outcomes: list[bool | None] = [None] * len(items)
    mapped = context.desks.mapped(node)
    if mapped is None:
        return outcomes
    uses: list[_Use] = []
    try:
        for index, (new, value) in enumerate(items):
            writer, place = yield from _begin(context, node, mapped, new.size_bytes, often=len(items) > 1)
            if writer is None:
                break
            use = _Use(index, new, writer, place)
            uses.append(use)
            writer.fill(place, value)
            (use.checksum,) = new.checksums.parts or compute(value).parts
        verdicts = yield from _proclaim(context, deadline, node, mapped, [use.new for use in uses])
        for use, verdict in zip(uses, verdicts, strict=True):
            if verdict is Verdict.ACCEPTED:
                use.writer.publish(_record(use.new, use.place, use.checksum))
                use.published = True
            outcomes[use.index] = {Verdict.ACCEPTED: False, Verdict.EXISTS: True}.get(verdict)
    finally:
        for use in reversed(uses):
            if not use.published:
                use.writer.abandon(use.place, use.new.size_bytes)
    return outcomes


def _record(new: NewChunk, place: int, checksum: int) -> Record:
    ttl_ms = 0 if new.ttl_s is None else max(1, round(new.ttl_s * 1000))
    return Record(new.key, new.version, place, new.size_bytes, checksum, new.pin, ttl_ms)


def _begin(
    context: Context, node: PeerId, mapped: Mapped, size_bytes: int, *, often: bool = False
) -> Logic[tuple[DeskWriter, int] | tuple[None, int]]:
    """A desk, and the place for a value of that size in it; (None, 0) if there is none now."""
    now_s = context.clock.now_s()
    if not mapped.alive(now_s):
        return None, 0
    writer = context.desks.get(node)
    if writer is not None:
        place = writer.begin(size_bytes)
        if place is not None:
            return writer, place
        if not writer.closed and writer.fits(size_bytes):
            return None, 0  # the node is behind with the records; a call makes it read them
        if writer.closed:
            context.desks.leave(node, writer)
    if not context.desks.may_ask(node, size_bytes, now_s, often=often):
        return None, 0
    (outcome,) = yield Ask(((node, messages.desk(size_bytes)),))
    given = None if isinstance(outcome, TanghuluError) else messages.desk_place(outcome)
    if given is None:
        context.desks.refused(node, size_bytes, now_s)
        return None, 0
    writer = context.desks.open(node, mapped, given)
    place = None if writer is None else writer.begin(size_bytes)
    return (None, 0) if writer is None or place is None else (writer, place)


def _proclaim(
    context: Context, deadline: Deadline, node: PeerId, mapped: Mapped, items: Sequence[NewChunk]
) -> Logic[list[Verdict]]:
    if not items:
        return []
    question, asked_s = Question(node, mapped.generation, items), context.clock.now_s()
    (outcome,) = yield Ask(((MASTER, question.call),), deadline.remaining_s() / 2)
    if context.clock.now_s() - asked_s > RELIED_S:
        return [Verdict.ASK_NODE] * len(items)
    return question.verdicts(outcome)
