"""Large values into ranges of their own: reserve, write, commit. Pure logic for the shells.

    RESERVE at the node; and meanwhile the checksum of the value's beginning, which brings that near
    WRITE, with the checksum behind it; and meanwhile PROCLAIM to the master, if the node's memory is mapped
    COMMIT at the node: checksum, and whether the master has accepted it

What moves together is added to the checksums right behind its move; a transfer through mapped memory does that by
itself, piece by piece (see ``transfer_engine.transports.shm.long_copy``). As with desks and streams nothing is
committed as proclaimed that the master did not accept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tanghulu.errors import TanghuluError
from tanghulu.store.client.logic import messages
from tanghulu.store.client.logic.commit import Question
from tanghulu.store.client.logic.context import Context
from tanghulu.store.client.logic.effects import Ask, Deadline, Deliver, Logic, Move, PeerId, Reach, portions
from tanghulu.store.client.logic.link import Link
from tanghulu.store.client.logic.putting import Putting, take_results
from tanghulu.store.client.model import PutOptions
from tanghulu.store.protocol import checksums as sums
from tanghulu.store.protocol.messages import Reservation
from tanghulu.store.protocol.types import Verdict
from tanghulu.transfer_engine.engine import Opcode, TransferRequest

#: Of a value, what its checksum has seen before the node has made room: as much as fits into that time.
AHEAD_BYTES = 4 << 20


@dataclass(slots=True)
class Write:
    """One item on its way to one node, in three steps."""

    item: Putting
    node: PeerId
    reservation: Reservation
    error: TanghuluError | None = None
    verdict: Verdict = Verdict.ASK_NODE
    rest: sums.Rest | None = None  # the checksums, of what they have not seen yet
    _num_moved: int = 0

    def begin_checksum(self, part_bytes: int) -> None:
        """The value begins to move."""
        if not self.item.new.checksums.parts:
            running, self.item.running = self.item.running, None
            self.rest = sums.Rest(running or sums.RunningChecksums(self.item.new.size_bytes, part_bytes))

    def moved(self, request: TransferRequest, error: TanghuluError | None) -> None:
        """The next request of the value has moved, or has not."""
        self.error = self.error or error
        if self.error is None and self.rest is not None:
            if self.rest.num_shown == self._num_moved:  # not by the transfer itself
                self.rest.add(request.source)
            self._num_moved += request.length

    def checksums(self, part_bytes: int) -> sums.Checksums:
        """Of the value, all of which has moved."""
        if self.rest is None:
            return self.item.new.checksums
        if self.rest.running.complete:
            return self.rest.running.end()
        return sums.compute_joined(self.item.pieces or (self.item.value,), part_bytes)

    @property
    def is_written(self) -> bool:
        """Whether it is to be committed."""
        return self.error is None and self.verdict is not Verdict.EXISTS


def begin_ahead(items: Sequence[Putting], options: PutOptions) -> Callable[[], None] | None:
    """What can be done while a node makes room for ``items``; raises InvalidRequest for too many parts."""
    item = items[0]
    if len(items) > 1 or item.pieces or item.new.checksums.parts:
        return None
    running = item.running = sums.RunningChecksums(item.new.size_bytes, options.part_bytes)
    return lambda: running.add(item.value[:AHEAD_BYTES])


def take_reservations(
    context: Context, node: PeerId, items: Sequence[Putting], outcome: messages.AnyReply | TanghuluError
) -> list[Write]:
    """The node's answer to RESERVE: what is to be written now; the other items know why not."""
    if isinstance(outcome, TanghuluError):
        take_results(context, node, items, outcome)
        return []
    writes: list[Write] = []
    for item, reservation in zip(items, messages.reservations(outcome), strict=True):
        if isinstance(reservation, TanghuluError):
            item.failed(node, reservation)
        elif reservation is None:
            item.existed = True
        else:
            context.leases.hold(node, reservation.lease_id)
            writes.append(Write(item, node, reservation))
    return writes


def write_all(context: Context, deadline: Deadline, writes: list[Write], options: PutOptions) -> Logic[None]:
    """Move every value to its range and commit it; the items then know what became of them."""
    requests: list[TransferRequest] = []
    moving: list[Write] = []
    links: dict[tuple[PeerId, bool], Link | TanghuluError] = {}
    for write in writes:
        where = (write.node, write.reservation.copies_only)
        if where not in links:
            links[where] = yield Reach(*where)
        link = links[where]
        if isinstance(link, TanghuluError):
            write.error = link
            continue
        write.begin_checksum(options.part_bytes)
        own = list(_requests(write, link))
        requests += own
        moving += [write] * len(own)
    generation = _generation(context, writes, options)
    items = [write.item.new for write in writes]
    question = Question(writes[0].node, generation, items) if generation else None
    for start, part in portions(requests):
        if question is not None and not start:
            errors, outcome = yield Deliver(part, question.call, deadline.remaining_s() / 2)
            for write, verdict in zip(writes, question.verdicts(outcome), strict=True):
                write.verdict = verdict
        else:
            errors = yield Move(part)
        for write, request, error in zip(moving[start : start + len(part)], part, errors, strict=True):
            write.moved(request, error)
    yield from _commit(context, deadline, writes, options, generation)


def _requests(write: Write, link: Link) -> Iterator[TransferRequest]:
    """What moves the value to its range."""
    offset, lease_id = write.reservation.offset, write.reservation.lease_id
    for piece in write.item.pieces or (write.item.value,):
        yield TransferRequest(Opcode.WRITE, piece, link.remote, offset, len(piece), 0, lease_id, digest=write.rest)
        offset += len(piece)


def _generation(context: Context, writes: Sequence[Write], options: PutOptions) -> int:
    """Which life of their node may be proclaimed to hold all ``writes``; 0: it is for the node to announce them.

    Through mapped memory they arrive within some milliseconds, unless the node has ended: then its promises end, too.
    """
    node = writes[0].node
    mapped = context.desks.mapped(node)
    if mapped is None or not options.visible or not mapped.alive(context.clock.now_s()):
        return 0
    for write in writes:
        if write.node != node or write.item.replicas > 1 or write.reservation.copies_only or write.error is not None:
            return 0
    return mapped.generation


def _commit(
    context: Context, deadline: Deadline, writes: list[Write], options: PutOptions, generation: int
) -> Logic[None]:
    calls: list[tuple[PeerId, messages.AnyCall]] = []
    committed: list[list[Write]] = []
    for node in dict.fromkeys(write.node for write in writes):
        own = [write for write in writes if write.node == node]
        written = sorted((w for w in own if w.is_written), key=lambda write: write.verdict is not Verdict.ACCEPTED)
        aborted = [write.reservation.lease_id for write in own if not write.is_written]
        items = [(w.reservation.lease_id, w.checksums(options.part_bytes)) for w in written]
        num_accepted = sum(write.verdict is Verdict.ACCEPTED for write in written)
        remaining_ms = deadline.remaining_ms()
        call = messages.commit(items, aborted, options.visible, remaining_ms, num_accepted, generation)
        calls.append((node, call))
        committed.append(written)
    outcomes = yield Ask(calls)
    for (node, _), written, outcome in zip(calls, committed, outcomes, strict=True):
        take_results(context, node, [write.item for write in written], outcome)
    for write in writes:
        context.leases.released(write.node, write.reservation.lease_id)
        if write.error is not None:
            write.item.error = write.error
        elif write.verdict is Verdict.EXISTS:
            write.item.existed = True
