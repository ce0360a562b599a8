"""How values are read: find a holder, get or pin there, move, verify, unpin; another holder if that fails.

Pure logic for the shells. One *round* asks every node at most once: all keys are grouped by the holder to be tried
next, all nodes are asked at once, all transfers move as one batch. What failed goes into the next round with its next
holder; a key that has run out of cached holders is looked up at the master, once; then its error is final.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tanghulu.errors import (
    ChecksumMismatch,
    ChunkNotFound,
    DeadlineExceeded,
    LeaseExpired,
    NodeUnavailable,
    TanghuluError,
)
from tanghulu.store.client.chunk import Chunk
from tanghulu.store.client.logic import messages, ranges
from tanghulu.store.client.logic.context import Context
from tanghulu.store.client.logic.effects import Ask, Deadline, Logic, Move, PeerId, Reach, Tell, portions
from tanghulu.store.client.logic.finding import find_holders
from tanghulu.store.client.logic.leases import LeasedMemory
from tanghulu.store.client.logic.link import Link
from tanghulu.store.client.logic.wants import Want, mismatch, too_small
from tanghulu.store.protocol import checksums as sums
from tanghulu.store.protocol.messages import Found
from tanghulu.store.protocol.shared_index import Entry, IndexReader
from tanghulu.store.protocol.types import MAX_INLINE_BYTES
from tanghulu.transfer_engine.core.buffers import Buffer
from tanghulu.transfer_engine.engine import Opcode, TransferRequest

#: Keys in one GET. One GET per node is under way, so that neither side has to buffer many answers.
KEYS_PER_GET = 1024
#: Values up to this size are copied by means of a shared index; larger ones are worth a lease, which needs no copy.
MAX_COPIED_BYTES = MAX_INLINE_BYTES
#: How often one get pins a key again whose lease ended before its bytes had come.
MAX_PINNED_AGAIN = 3


@dataclass(slots=True)
class _Pinned:
    """One want with a lease on a node, or, without one, whose inline value was not what was put."""

    want: Want
    node: PeerId
    found: Found
    begin: int = 0  # of the value, what is read: [begin, end)
    end: int = 0
    arrived: memoryview | None = None  # where its bytes are, or will be
    error: TanghuluError | None = None
    keeps_lease: bool = False
    running: sums.RunningChecksums | None = None  # of what arrives

    def matches(self) -> bool:
        """Whether what has arrived is what was put."""
        assert self.arrived is not None
        if self.running is not None and self.running.complete:
            return sums.are_from(self.running.end(), self.found.checksums, self.begin)
        return sums.matches_from(self.arrived, self.found.checksums, self.begin)


def fetch(context: Context, deadline: Deadline, wants: Sequence[Want], flush: Callable[[], None]) -> Logic[None]:
    """Set every want's ``result``. ``flush`` is what a Chunk without a copy calls when it is closed."""
    for want in wants:
        _look_locally(context, want)
    yield from _rounds(context, deadline, [want for want in wants if want.result is None], flush)


def fetch_one(context: Context, deadline: Deadline, want: Want, flush: Callable[[], None]) -> Logic[None]:
    """``fetch`` for one key, the commonest call by far: with a likely holder it needs no grouping."""
    _look_locally(context, want)
    if want.result is not None:
        return
    guessed = not want.holders
    if guessed:  # a node of this host is asked before the master, unless its index would have told
        want.holders = [node for node in context.nodes.local_for(want.key, 0)[:1] if node not in context.indexes]
    if want.holders:
        node = want.holders[0]
        alone = len(want.holders) == 1 and not guessed
        call = messages.get((want.key,), context.inline_bytes(node), deadline.remaining_ms())
        (outcome,) = yield Ask(((node, call),), None if alone else _patience_s(deadline))
        pinned = _take_answer(context, deadline, node, (want,), outcome)
        if pinned:
            yield from _read_pinned(context, pinned, flush)
    if want.result is None:
        yield from _rounds(context, deadline, [want], flush)


def _rounds(context: Context, deadline: Deadline, open_wants: list[Want], flush: Callable[[], None]) -> Logic[None]:
    while open_wants:
        yield from find_holders(context, deadline, [w for w in open_wants if not w.holders])
        groups: dict[PeerId, list[Want]] = {}
        for want in open_wants:
            if want.result is None and want.holders:
                groups.setdefault(want.holders[0], []).append(want)
        if groups:
            yield from _round(context, deadline, groups, flush)
        open_wants = [w for w in open_wants if w.result is None]


# --- finding


def _look_locally(context: Context, want: Want) -> None:
    """Read the value by means of a shared index, or learn from it or from the cache who is likely to have it."""
    indexes = context.indexes
    if indexes:
        now_s = context.clock.now_s()
        for node in indexes if len(context.nodes.local_ids()) < 2 else _nearest_first(context, want.key):
            index = indexes.get(node)
            if index is None:  # this client has not opened its memory: it is asked, and then opened
                break
            entry = index.find(want.key, now_s)
            if entry is None:
                continue
            if entry.size_bytes > MAX_COPIED_BYTES or not _copy(context, want, node, index, entry):
                want.holders = [node]
            return
    want.holders = list(context.locations.get(want.key))


def _nearest_first(context: Context, key: str) -> list[PeerId]:
    """All nodes of this host; the keys are shared among them as puts share them, so reads of replicas are too."""
    local = context.nodes.local_for(key, 0)
    return local + [node for node in context.indexes if node not in local]


def _copy(context: Context, want: Want, node: PeerId, index: IndexReader, entry: Entry) -> bool:
    """Copy the value that the index names; False if that was too late."""
    buffer, size = want.buffer, entry.size_bytes
    if buffer is None or want.part is not None:
        value = index.read(entry)
        if value is None:
            return False
        if want.part is None:
            want.result = Chunk(want.key, entry.version, value)
        else:
            ranges.deliver(want, entry.version, size, 0, value)
    elif not too_small(want, size):
        if not index.read_into(entry, buffer.view(0, size)):
            return False
        want.result = size
    context.reads.note(node, want.key, size)
    return True


# --- one round


def _round(
    context: Context, deadline: Deadline, groups: dict[PeerId, list[Want]], flush: Callable[[], None]
) -> Logic[None]:
    asked = {node: wants[:KEYS_PER_GET] for node, wants in groups.items()}
    remaining_ms = deadline.remaining_ms()
    calls = [
        (node, messages.get([w.key for w in wants], context.inline_bytes(node), remaining_ms))
        for node, wants in asked.items()
    ]
    others = any(len(want.holders) > 1 for wants in asked.values() for want in wants)
    outcomes = yield Ask(calls, _patience_s(deadline) if others else None)
    pinned: list[_Pinned] = []
    for (node, wants), outcome in zip(asked.items(), outcomes, strict=True):
        pinned += _take_answer(context, deadline, node, wants, outcome)
    if pinned:
        yield from _read_pinned(context, pinned, flush)


def _patience_s(deadline: Deadline) -> float:
    """How long to wait for one holder while there are others: a node that stands still must not use up the time."""
    return deadline.remaining_s() / 2


def _take_answer(
    context: Context,
    deadline: Deadline,
    node: PeerId,
    wants: Sequence[Want],
    outcome: messages.AnyReply | TanghuluError,
) -> list[_Pinned]:
    """Inline values become results, failures send their want on; what the node pinned is still to be read."""
    if isinstance(outcome, TanghuluError):
        _node_failed(context, deadline, node, wants, outcome)
        return []
    pinned: list[_Pinned] = []
    answers = messages.found(outcome)
    if not answers:
        _node_failed(context, deadline, node, wants, NodeUnavailable(f"{node} answered nothing"))
    for want, answer in zip(wants, answers, strict=False):  # what it left out is asked for in the next round
        if isinstance(answer, TanghuluError):
            _holder_failed(context, want, node, answer)
            continue
        found, value = answer
        if value is not None:
            if not _take_inline(want, found, value):  # the node is told, as if it had been pinned
                pinned.append(_Pinned(want, node, found, error=mismatch(want.key, node, found)))
        else:
            context.leases.hold(node, found.lease_id)
            pinned.append(_Pinned(want, node, found))
    return pinned


def _node_failed(
    context: Context, deadline: Deadline, node: PeerId, wants: Sequence[Want], error: TanghuluError
) -> None:
    if isinstance(error, NodeUnavailable):
        context.nodes.expire()
    is_over = isinstance(error, DeadlineExceeded) and deadline.remaining_s() <= 0
    for want in wants:
        if is_over:
            want.result = error
        else:
            _holder_failed(context, want, node, error)


def _holder_failed(context: Context, want: Want, node: PeerId, error: TanghuluError) -> None:
    """Try the next holder; the last one's error stays, unless it only said that it has not got the key."""
    want.tried.add(node)
    want.holders.remove(node)
    context.locations.discard(want.key, node)
    if not isinstance(error, ChunkNotFound):
        want.failure = error


def _take_inline(want: Want, found: Found, value: memoryview) -> bool:
    """The value that came is the result; False if it is not what was put."""
    if not sums.matches(value, found.checksums):
        return False
    if want.part is not None:
        ranges.deliver(want, found.version, found.size_bytes, 0, value)
    elif want.buffer is None:
        want.result = Chunk(want.key, found.version, value)
    elif not too_small(want, found.size_bytes):
        want.buffer.view(0, found.size_bytes)[:] = value
        want.result = found.size_bytes
    return True


# --- values that are pinned on their node


def _read_pinned(context: Context, pinned: list[_Pinned], flush: Callable[[], None]) -> Logic[None]:
    requests: list[TransferRequest] = []
    moving: list[_Pinned] = []
    links: dict[tuple[PeerId, bool], Link | TanghuluError] = {}
    for each in pinned:
        if each.error is not None:
            continue
        where = (each.node, each.found.copies_only)
        if where not in links:
            links[where] = yield Reach(*where)
        link = links[where]
        if isinstance(link, TanghuluError):
            each.error = link
            continue
        span = ranges.covering_span(each.want, each.found.size_bytes, each.found.checksums)
        if span is None:
            continue
        each.begin, each.end = span
        if each.want.buffer is None and link.view is not None:
            _look_at(context, each, link, flush)
        else:
            requests.append(_request(context, each, link))
            moving.append(each)
    for start, part in portions(requests):
        errors = yield Move(part)
        for each, error in zip(moving[start : start + len(part)], errors, strict=True):
            each.error = error
            if error is None:
                _take_moved(each)
    yield from _finish(context, pinned, links)


def _look_at(context: Context, each: _Pinned, link: Link, flush: Callable[[], None]) -> None:
    """No copy: the caller gets the node's own bytes, and keeps the lease."""
    found, node = each.found, each.node
    assert link.view is not None
    covered = link.view[found.offset + each.begin : found.offset + each.end]
    if not sums.matches_from(covered, found.checksums, each.begin):
        each.error = mismatch(each.want.key, node, found)
        return
    span = ranges.wanted_span(each.want, found.size_bytes)
    assert span is not None, "it was within before"
    leases, lease_id = context.leases, found.lease_id
    address, length = link.address + found.offset + span[0], span[1] - span[0]
    memory = LeasedMemory(address, length, link.view, lambda: leases.drop(node, lease_id))
    each.want.result = Chunk(each.want.key, found.version, np.asarray(memory), flush)
    each.keeps_lease = True


def _request(context: Context, each: _Pinned, link: Link) -> TransferRequest:
    want, found, length = each.want, each.found, each.end - each.begin
    fits = ranges.wanted_span(want, found.size_bytes) == (each.begin, each.end)
    buffer = want.buffer if want.buffer is not None and fits else Buffer(context.memory.take(length))
    each.arrived = buffer.view(0, length)
    if found.checksums.parts:
        each.running = sums.RunningChecksums(length, found.checksums.part_bytes)
    at, lease_id = found.offset + each.begin, found.lease_id
    return TransferRequest(Opcode.READ, buffer, link.remote, at, length, 0, lease_id, digest=each.running)


def _take_moved(each: _Pinned) -> None:
    assert each.arrived is not None
    want, found = each.want, each.found
    if not each.matches():
        each.error = mismatch(want.key, each.node, found)
    elif want.buffer is not None and each.arrived.obj is want.buffer.memory.obj:
        want.result = len(each.arrived)
    else:
        ranges.deliver(want, found.version, found.size_bytes, each.begin, each.arrived.toreadonly())


def _finish(
    context: Context, pinned: list[_Pinned], links: dict[tuple[PeerId, bool], Link | TanghuluError]
) -> Logic[None]:
    """Give back the leases, report corrupt chunks, send failed wants on to their next holder."""
    calls: list[tuple[PeerId, messages.AnyCall]] = []
    for node in dict.fromkeys(each.node for each in pinned):
        own = [each for each in pinned if each.node == node]
        corrupt = [each.want.key for each in own if isinstance(each.error, ChecksumMismatch)]
        leases = [each.found.lease_id for each in own if each.found.lease_id and not each.keeps_lease]
        link = links.get((node, own[0].found.copies_only))
        by_mapping = isinstance(link, Link) and link.view is not None
        num_bytes = sum(each.end - each.begin for each in own if each.error is None) if by_mapping else 0
        if leases or corrupt:
            calls.append((node, messages.unpin(leases, num_bytes, corrupt)))
            for lease_id in leases:
                context.leases.released(node, lease_id)
        for each in own:
            if isinstance(each.error, LeaseExpired) and each.want.num_expired < MAX_PINNED_AGAIN:
                each.want.num_expired += 1  # too slow, or the connection broke in between: the holder still has it
            elif each.error is not None:
                _holder_failed(context, each.want, node, each.error)
    if calls:
        yield Tell(calls)
