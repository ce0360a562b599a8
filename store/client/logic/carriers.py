"""The carriers of a put: write buffer and transfer, each reserve, fill and commit. Pure logic for the drivers.

``store.client.logic.plan`` chooses between them. In none of them does the client commit a chunk that the master did not
accept: the node receives the notice, or finds the record, only afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tanghulu.errors import TanghuluError
from tanghulu.store.client.logic import messages
from tanghulu.store.client.logic.commit import CommitCall, PutOp, commit_by_client, take_results
from tanghulu.store.client.logic.context import Context
from tanghulu.store.client.logic.directory_client import refresh_owners
from tanghulu.store.client.logic.effects import (
    MASTER,
    CallPeers,
    Deadline,
    Logic,
    NodeLink,
    OpenSegment,
    PeerId,
    Transfer,
    portions,
)
from tanghulu.store.client.logic.plan import Access, Committer, Route, joint_committer
from tanghulu.store.client.logic.write_buffers import MappedNode
from tanghulu.store.client.model import PutOptions
from tanghulu.store.protocol import checksums as sums
from tanghulu.store.protocol import methods
from tanghulu.store.protocol.messages import CommitItem, CommitRequest, OpenBufferRequest, Reservation
from tanghulu.store.protocol.terms import NO_TERM, Term
from tanghulu.store.protocol.types import CommitResult, NewChunk
from tanghulu.store.protocol.write_buffer import BufferWriter, Record
from tanghulu.transfer_engine.engine import Opcode, TransferRequest

#: Part of a value checksummed before the node has made room: as much as fits into that time.
AHEAD_BYTES = 4 << 20


# --- write buffer
#
#     value and checksum into the write buffer -> commit at the master -> accepted: publish the record -> done
#
# In this order a record is never published that the master did not accept, so the node may make a chunk of it at any
# time. Every exception goes another way: the master does not lead, or is rebuilding, or knows the key as the node's
# own; there is no write buffer, or no room in it.


@dataclass(slots=True)
class _Use:
    """One value in a write buffer; ends when its record is published, or is abandoned."""

    op: PutOp
    buffer: BufferWriter
    place: int
    checksum: int = 0


def put_in_buffer(context: Context, deadline: Deadline, node: PeerId, ops: Sequence[PutOp]) -> Logic[None]:
    """Put ``ops`` by a write buffer at ``node``: the first ones that fit; the others stay open."""
    mapped = context.mapped.get(node)
    if mapped is None:
        return
    uses: list[_Use] = []
    news: list[NewChunk] = []
    try:
        for op in ops:
            new = op.new
            found = context.write_buffers.reserve(node, new.size_bytes)
            if found is None:
                found = yield from _open_buffer(context, node, mapped.link, new.size_bytes, often=len(ops) > 1)
                if found is None:
                    break
            buffer, place = found
            use = _Use(op, buffer, place)
            uses.append(use)
            news.append(new)
            mapped.link.remote.touch(buffer.offset + place, new.size_bytes)
            buffer.fill(place, op.value)
            (use.checksum,) = new.checksums.parts or op.checksums(0).parts
        if uses:
            results = yield from commit_by_client(context, deadline, node, mapped.generation, news)
            _publish(context, node, mapped, uses, results)
    finally:
        for use in reversed(uses):
            if not use.op.placed:
                use.buffer.abandon(use.place, use.op.new.size_bytes)


def _publish(
    context: Context, node: PeerId, mapped: MappedNode, uses: Sequence[_Use], results: Sequence[CommitResult]
) -> None:
    """End the uses of chunks accepted by the master with a record for the node."""
    for use, result in zip(uses, results, strict=True):
        op, new = use.op, use.op.new
        if result is CommitResult.ACCEPTED:
            ttl_ms = 0 if new.ttl_s is None else max(1, round(new.ttl_s * 1000))
            use.buffer.publish(Record(new.key, new.version, use.place, new.size_bytes, use.checksum, new.pin, ttl_ms))
            op.placed.append(node)
        elif result is CommitResult.EXISTS:
            op.existed = True
        elif mapped.index.find(new.key, context.clock.now_s()) is not None:
            context.reads.note(node, new.key, 0)  # a hit counts for the order of evictions
            op.existed = True
        op.done = op.existed or bool(op.placed)


def _open_buffer(
    context: Context, node: PeerId, link: NodeLink, size_bytes: int, *, often: bool
) -> Logic[tuple[BufferWriter, int] | None]:
    """Request a write buffer from ``node`` if that pays now; return it and the value's position in it."""
    buffers, now_s = context.write_buffers, context.clock.now_s()
    if not buffers.may_request(node, size_bytes, now_s, often=often):
        return None
    (answer,) = yield CallPeers(((node, methods.OPEN_BUFFER.call(OpenBufferRequest(size_bytes))),))
    given = None if isinstance(answer, TanghuluError) else answer.message.place
    if given is None:
        buffers.refused(node, size_bytes, now_s)
        return None
    buffers.opened(node, link, given)
    return buffers.reserve(node, size_bytes)


# --- transfer
#
#     RESERVE at the node; meanwhile the checksum of the value's beginning, which brings that into the cache
#     transfer, followed by the checksum; meanwhile the commit at the master, if the client commits
#     COMMIT at the node: checksum, and whether the master has accepted it
#
# Moved bytes are added to the checksums right after the move; a transfer through mapped memory does that by
# itself, piece by piece (see ``transfer_engine.transports.shm.long_copy``).


@dataclass(slots=True)
class Filling:
    """One item on its way into the range reserved for it at one node."""

    op: PutOp
    node: PeerId
    route: Route
    reservation: Reservation
    error: TanghuluError | None = None
    result: CommitResult = CommitResult.ASK_NODE
    answered: bool = False  # to the node, that the range was committed or aborted
    rest: sums.Rest | None = None  # the checksums, of the bytes not covered yet
    _num_moved: int = 0

    def begin_checksum(self, part_bytes: int) -> None:
        """Record that the value begins to move."""
        if not self.op.new.checksums.parts:
            running, self.op.running = self.op.running, None
            self.rest = sums.Rest(running or sums.RunningChecksums(self.op.new.size_bytes, part_bytes))

    def moved(self, request: TransferRequest, error: TanghuluError | None) -> None:
        """Record that the next request of the value has moved, or has failed."""
        self.error = self.error or error
        if self.error is None and self.rest is not None:
            if self.rest.num_shown == self._num_moved:  # not by the transfer itself
                self.rest.add(request.source)
            self._num_moved += request.length

    def checksums(self, part_bytes: int) -> sums.Checksums:
        """Return the checksums of a completely moved value."""
        if self.rest is not None and self.rest.running.complete:
            return self.rest.running.end()
        return self.op.checksums(part_bytes)

    @property
    def is_filled(self) -> bool:
        """Whether it is to be committed."""
        return self.error is None and self.result is not CommitResult.EXISTS


def begin_ahead(ops: Sequence[PutOp], options: PutOptions) -> Callable[[], None] | None:
    """Return the work to do while a node makes room for ``ops``; raises InvalidRequest for too many parts."""
    op = ops[0]
    if len(ops) > 1 or op.pieces or op.new.checksums.parts:
        return None
    running = op.running = sums.RunningChecksums(op.new.size_bytes, options.part_bytes)
    return lambda: running.add(op.value[:AHEAD_BYTES])


def take_reservations(
    context: Context,
    node: PeerId,
    ops: Sequence[tuple[PutOp, Route]],
    answer: messages.AnyReply | TanghuluError,
    fillings: list[Filling],
) -> None:
    """Take the node's answer to RESERVE: reserved items join ``fillings``; the others get their error."""
    if isinstance(answer, TanghuluError):
        take_results(context, node, [op for op, _ in ops], answer)
        return
    for (op, route), reservation in zip(ops, messages.reservations(answer), strict=True):
        if reservation is None or isinstance(reservation, TanghuluError):
            op.take_result(node, True if reservation is None else reservation)
        else:
            fillings.append(Filling(op, node, route, reservation))
            context.leases.hold(node, reservation.lease_id)


def end_reservations(context: Context, fillings: Sequence[Filling]) -> None:
    """Release all ranges; those whose node has not answered COMMIT are returned with the next call."""
    for each in fillings:
        end = context.leases.released if each.answered else context.leases.drop
        end(each.node, each.reservation.lease_id)


def transfer_all(context: Context, deadline: Deadline, fillings: list[Filling], options: PutOptions) -> Logic[None]:
    """Move every value to its range and commit it; the items then have their outcomes."""
    requests: list[TransferRequest] = []
    moving: list[Filling] = []
    links: dict[tuple[PeerId, bool], NodeLink | TanghuluError] = {}
    for each in fillings:
        where = (each.node, each.reservation.copies_only)
        if where not in links:
            links[where] = yield OpenSegment(*where)
        link = links[where]
        if isinstance(link, TanghuluError):
            each.error = link
            continue
        each.begin_checksum(options.part_bytes)
        own = list(_requests(each, link))
        requests += own
        moving += [each] * len(own)
    commit, generation = _commit_ahead(context, fillings)
    for start, part in portions(requests):
        if commit is not None and not start:
            errors, answers = yield Transfer(part, commit.calls, deadline.remaining_s() / 2)
            for each, result in zip(fillings, commit.results(answers), strict=True):
                each.result = result
        else:
            errors, _ = yield Transfer(part)
        for each, request, error in zip(moving[start : start + len(part)], part, errors, strict=True):
            each.moved(request, error)
    term = NO_TERM if commit is None else commit.term
    yield from _commit_at_nodes(context, deadline, fillings, options, generation, term)
    if commit is not None and commit.moved:
        yield from refresh_owners(context, MASTER)


def _requests(filling: Filling, link: NodeLink) -> Iterator[TransferRequest]:
    """Yield the transfers that move the value to its range."""
    offset, lease_id = filling.reservation.offset, filling.reservation.lease_id
    for piece in filling.op.pieces or (filling.op.value,):
        yield TransferRequest(Opcode.WRITE, piece, link.remote, offset, len(piece), 0, lease_id, digest=filling.rest)
        offset += len(piece)


def _commit_ahead(context: Context, fillings: Sequence[Filling]) -> tuple[CommitCall | None, int]:
    """Return the master call that commits all ``fillings``, and their node's generation; (None, 0): nodes commit."""
    node, num_nodes = fillings[0].node, len({each.node for each in fillings})
    mapped = context.mapped.get(node)
    lives = context.access(node, context.clock.now_s()) is Access.MAPPED
    by_mapping = lives and all(each.error is None and not each.reservation.copies_only for each in fillings)
    committer = joint_committer([each.route for each in fillings], num_nodes, by_mapping=by_mapping)
    if mapped is None or committer is Committer.NODE:
        return None, 0
    news = [each.op.new for each in fillings]
    return CommitCall(context, node, mapped.generation, news), mapped.generation


def _commit_at_nodes(
    context: Context,
    deadline: Deadline,
    fillings: list[Filling],
    options: PutOptions,
    generation: int,
    term: Term,
) -> Logic[None]:
    """COMMIT at every node; the master of ``term`` has accepted for this ``generation`` of the only node."""
    calls: list[tuple[PeerId, messages.AnyCall]] = []
    committed: list[list[Filling]] = []
    for node in dict.fromkeys(each.node for each in fillings):
        own = [each for each in fillings if each.node == node]
        filled = sorted(
            (each for each in own if each.is_filled), key=lambda each: each.result is not CommitResult.ACCEPTED
        )
        aborted = [each.reservation.lease_id for each in own if not each.is_filled]
        items = [CommitItem(each.reservation.lease_id, each.checksums(options.part_bytes)) for each in filled]
        num_accepted = sum(each.result is CommitResult.ACCEPTED for each in filled)
        request = CommitRequest(
            items, aborted, options.visible, deadline.remaining_ms(), num_accepted, generation, term
        )
        calls.append((node, methods.COMMIT.call(request)))
        committed.append(filled)
    answers = yield CallPeers(calls)
    for (node, _), filled, answer in zip(calls, committed, answers, strict=True):
        for each in fillings:
            each.answered = each.answered or (each.node == node and not isinstance(answer, TanghuluError))
        take_results(context, node, [each.op for each in filled], answer)
    for each in fillings:
        if each.error is not None:
            each.op.error = each.error
        elif each.result is CommitResult.EXISTS:
            each.op.existed = True
