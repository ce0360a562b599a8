"""Reads: find a holder, get or pin there, move, verify, unpin; try another holder after a failure.

Pure logic for the drivers. One *round* calls every node at most once: all keys are grouped by the holder to try next,
all nodes are called at once, all transfers move as one batch. Failed keys enter the next round with their next holder;
a key without further cached holders is looked up at the master, once; then its error is final.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tanghulu.errors import (
    ChecksumMismatch,
    ChunkNotFound,
    DeadlineExceeded,
    DirectoryIncomplete,
    LeaseExpired,
    MasterUnavailable,
    NodeUnavailable,
    TanghuluError,
)
from tanghulu.rpc.wire import Failure
from tanghulu.runtime.clock import Backoff
from tanghulu.store.client.chunk import Chunk
from tanghulu.store.client.logic import directory_client, messages, ranges
from tanghulu.store.client.logic.context import Context
from tanghulu.store.client.logic.effects import (
    CallPeers,
    Deadline,
    Logic,
    NodeLink,
    Notify,
    OpenSegment,
    PeerId,
    Sleep,
    Transfer,
    portions,
)
from tanghulu.store.client.logic.leases import LeasedMemory
from tanghulu.store.client.logic.ranges import GetOp, ValueCheck, too_small
from tanghulu.store.protocol import checksums as sums
from tanghulu.store.protocol import methods
from tanghulu.store.protocol.messages import Found, GetReply, GetRequest, UnpinRequest
from tanghulu.store.protocol.shared_index import Entry, IndexReader
from tanghulu.store.protocol.types import MAX_INLINE_BYTES, RELIED_S
from tanghulu.transfer_engine.core.buffers import Buffer
from tanghulu.transfer_engine.engine import Opcode, TransferRequest

#: Keys in one GET. One GET per node is in flight, so that neither side has to buffer many answers.
KEYS_PER_GET = 1024
#: Values up to this size are copied by a shared index; larger ones are worth a lease, which needs no copy.
MAX_COPIED_BYTES = MAX_INLINE_BYTES
#: Number of times that one get pins a key again whose lease ended before its bytes had arrived.
MAX_PINNED_AGAIN = 3
#: Seconds during which holders named by the master are asked again while they lack the chunk: the time that a putter
#: may take from its commit at the master until its node knows; and the first and last pause between two requests.
LATE_S = RELIED_S
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.0002, 0.03


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """The deadline and the pauses of calls to a rebuilding master."""

    deadline: Deadline
    backoff: Backoff


@dataclass(slots=True)
class _Pinned:
    """One get with a lease on a node, or without one if its inline value did not match its checksums."""

    op: GetOp
    node: PeerId
    found: Found
    begin: int = 0  # the part of the value to read: [begin, end)
    end: int = 0
    arrived: Sequence[memoryview] = ()  # the place of its bytes, present or future
    error: TanghuluError | None = None
    num_moving: int = 0  # unfinished transfers
    keeps_lease: bool = False
    given_back: bool = False
    running: sums.RunningChecksums | None = None  # of the arriving bytes

    def matches(self) -> bool:
        """Return whether the received bytes match the checksums of the put."""
        if self.op.value_check is not None and self.op.value_check.holds():
            return True
        if self.running is not None and self.running.complete:
            return sums.are_from(self.running.end(), self.found.checksums, self.begin)
        if len(self.arrived) == 1:
            return sums.matches_from(self.arrived[0], self.found.checksums, self.begin)
        checksums = self.found.checksums
        return not checksums.parts or sums.compute_joined(self.arrived, checksums.part_bytes).parts == checksums.parts


def fetch(context: Context, deadline: Deadline, ops: Sequence[GetOp]) -> Logic[None]:
    """Set the ``result`` of all ``ops`` without one."""
    for op in ops:
        if op.result is None:
            _look_locally(context, op)
    yield from _rounds(context, deadline, [op for op in ops if op.result is None])


def fetch_one(context: Context, deadline: Deadline, op: GetOp) -> Logic[Chunk | int]:
    """``fetch`` for one key, by far the most frequent call; return its result, or raise its error."""
    _look_locally(context, op)
    if op.result is None:
        yield from _fetch_one(context, deadline, op)
    assert op.result is not None
    if isinstance(op.result, TanghuluError):
        raise op.result
    return op.result


def _fetch_one(context: Context, deadline: Deadline, op: GetOp) -> Logic[None]:
    """Call the likely holder without grouping into a round; try other holders in rounds."""
    guessed = not op.holders
    if guessed:  # a node of this host is asked before the master, unless its index would have shown the key
        op.holders = [node for node in context.nodes.local_for(op.key, 0)[:1] if node not in context.mapped]
    if op.holders:
        node = op.holders[0]
        alone = len(op.holders) == 1 and not guessed
        call = methods.GET.call(GetRequest((op.key,), context.inline_bytes(node), deadline_ms=deadline.remaining_ms()))
        (outcome,) = yield CallPeers(((node, call),), None if alone else _patience_s(deadline))
        yield from _take_answers(context, deadline, [(node, (op,), outcome)])
    if op.result is None:
        yield from _rounds(context, deadline, [op])


def _rounds(context: Context, deadline: Deadline, open_ops: list[GetOp]) -> Logic[None]:
    rebuilt = Rebuilt(directory_client.patience(context, deadline), directory_client.rebuilding_backoff(context))
    while open_ops:
        unknown = [op for op in open_ops if not op.holders]
        # An absent master is waited for when nothing else is left to do.
        yield from find_holders(context, deadline, rebuilt, unknown, waits=len(unknown) == len(open_ops))
        groups: dict[PeerId, list[GetOp]] = {}
        for op in open_ops:
            if op.result is None and op.holders:
                groups.setdefault(op.holders[0], []).append(op)
        if groups:
            yield from _round(context, deadline, groups)
        open_ops = [op for op in open_ops if op.result is None]


# --- finding a holder


def _look_locally(context: Context, op: GetOp) -> None:
    """Read the value by a shared index, or learn from the index or the cache which node is likely to hold it."""
    all_mapped = context.mapped
    if all_mapped:
        now_s = context.clock.now_s()
        for node in all_mapped if len(context.nodes.local_ids()) < 2 else _nearest_first(context, op.key):
            mapped = all_mapped.get(node)
            if mapped is None:  # this client has not opened its memory: it is called, and then opened
                break
            entry = mapped.index.find(op.key, now_s)
            if entry is None:
                if not mapped.index.is_kept(now_s) and not mapped.link.remote.alive:
                    context.departed.add(node)
                continue
            if entry.size_bytes > MAX_COPIED_BYTES or not _copy(context, op, node, mapped.index, entry):
                op.holders = [node]
            return
    nodes = context.nodes
    op.holders = nodes.trusted([node for node in context.locations.get(op.key) if nodes.get(node) is not None])


def _nearest_first(context: Context, key: str) -> list[PeerId]:
    """Return all nodes of this host; keys are shared among them as for puts, hence so are reads of replicas."""
    local = context.nodes.local_for(key, 0)
    return local + [node for node in context.mapped if node not in local]


def _copy(context: Context, op: GetOp, node: PeerId, index: IndexReader, entry: Entry) -> bool:
    """Copy the value named by the index; False if that was too late."""
    buffer, size = op.buffer, entry.size_bytes
    if buffer is None or op.part is not None:
        value = index.read(entry)
        if value is None:
            return False
        if op.part is None:
            op.result = Chunk(op.key, entry.version, value)
        else:
            ranges.deliver(op, entry.version, size, 0, value)
    elif not too_small(op, size):
        if not index.read_into(entry, buffer.view(0, size)):
            return False
        op.result = size
    context.reads.note(node, op.key, size)
    return True


def find_holders(
    context: Context, deadline: Deadline, rebuilt: Rebuilt, ops: list[GetOp], *, waits: bool
) -> Logic[None]:
    """Give each of ``ops`` a holder to try, or its final error.

    Unless it ``waits``, an absent master leaves them unchanged, to be looked up again.
    """
    unknown = yield from _still_wanted(context, deadline, ops)
    if not unknown:
        return
    try:
        found, incomplete = yield from directory_client.locate(
            context, deadline, [op.key for op in unknown], waits=waits
        )
    except TanghuluError as error:
        if not waits and isinstance(error, MasterUnavailable):
            return
        for op in unknown:
            op.result = error
        return
    for op, nodes in zip(unknown, found, strict=True):
        _take_located(context, op, nodes, incomplete=incomplete)
    yield from _await_rebuild(rebuilt, [op for op in unknown if incomplete and not op.listed])


def _take_located(context: Context, op: GetOp, nodes: Sequence[PeerId], *, incomplete: bool) -> None:
    op.located, op.listed = True, bool(nodes)
    op.holders = [node for node in nodes if node not in op.tried]
    if nodes:
        context.locations.set(op.key, tuple(nodes))
    elif not incomplete:
        context.locations.forget(op.key)
        op.failure = None  # the failed holder is removed


def _still_wanted(context: Context, deadline: Deadline, ops: list[GetOp]) -> Logic[list[GetOp]]:
    """Return the items to look up, after a pause if all had been looked up before; the others get their final error."""
    unknown: list[GetOp] = []
    late: list[GetOp] = []
    for op in ops:
        if not op.located:
            unknown.append(op)
        elif _may_come(context, deadline, op):
            late.append(op)
        else:
            op.result = op.failure or not_found(op.key)
    if late:
        yield Sleep(min(map(_pause_s, late)))
    for op in late:
        op.come_again()
    return unknown + late


def _may_come(context: Context, deadline: Deadline, op: GetOp) -> bool:
    """Return whether to ask the master and its holders once more: they lacked the chunk, and nothing else failed.

    The master is notified of a chunk before its node serves it, and of an evicted one afterwards. So a reader that
    learns of a key may be faster than its putter; and the master will not name an evicted chunk the next time.
    """
    now_s = context.clock.now_s()
    if not op.num_late:
        op.late_s = now_s
    is_over = now_s - op.late_s > LATE_S or deadline.remaining_s() <= _pause_s(op)
    return op.listed and not op.failure and not is_over


def _pause_s(op: GetOp) -> float:
    return min(_FIRST_PAUSE_S * (1 << op.num_late), _LAST_PAUSE_S)


def _await_rebuild(rebuilt: Rebuilt, ops: list[GetOp]) -> Logic[None]:
    """Ask a rebuilding master that lacks these keys again after a pause, and no other peer."""
    if not ops:
        return
    pause_s = rebuilt.backoff.pause_s()
    if rebuilt.deadline.remaining_s() <= pause_s:
        for op in ops:
            op.result = DirectoryIncomplete(
                f"the master is rebuilding its directory and does not know {op.key!r} yet; try again in a few seconds"
            )
        return
    yield Sleep(pause_s)
    for op in ops:
        op.located = False
        op.tried.clear()


# --- one round


def _round(context: Context, deadline: Deadline, groups: dict[PeerId, list[GetOp]]) -> Logic[None]:
    called = {node: ops[:KEYS_PER_GET] for node, ops in groups.items()}
    remaining_ms = deadline.remaining_ms()
    calls: list[tuple[PeerId, messages.AnyCall]] = []
    for node, ops in called.items():
        request = GetRequest([op.key for op in ops], context.inline_bytes(node), deadline_ms=remaining_ms)
        calls.append((node, methods.GET.call(request)))
    others = len(called) > 1 or any(len(op.holders) > 1 for ops in called.values() for op in ops)
    outcomes = yield CallPeers(calls, _patience_s(deadline) if others else None)
    answers = [(node, ops, outcome) for (node, ops), outcome in zip(called.items(), outcomes, strict=True)]
    yield from _take_answers(context, deadline, answers)


def _patience_s(deadline: Deadline) -> float:
    """Return the seconds to wait for one holder while there are others: a stalled node must not use up the time."""
    return deadline.remaining_s() / 2


def _take_answers(
    context: Context,
    deadline: Deadline,
    answers: Sequence[tuple[PeerId, Sequence[GetOp], messages.AnyReply | TanghuluError]],
) -> Logic[None]:
    """Take each node's answer, and read the pinned chunks. No unneeded lease is left, however this ends."""
    pinned: list[_Pinned] = []
    try:
        for node, ops, outcome in answers:
            _take_answer(context, deadline, node, ops, outcome, pinned)
        if pinned:
            yield from _read_pinned(context, pinned)
    finally:
        for each in pinned:
            if each.found.lease_id and not each.keeps_lease and not each.given_back:
                context.leases.drop(each.node, each.found.lease_id)


def _take_answer(
    context: Context,
    deadline: Deadline,
    node: PeerId,
    ops: Sequence[GetOp],
    outcome: messages.AnyReply | TanghuluError,
    pinned: list[_Pinned],
) -> None:
    """Turn inline values into results and failures into further tries; pinned chunks are still to be read."""
    if isinstance(outcome, TanghuluError):
        _node_failed(context, deadline, node, ops, outcome)
        return
    context.masters.fence.admits(outcome.message.term)
    answers = list(_found(outcome.message, outcome.attachment))
    if not answers:
        _node_failed(context, deadline, node, ops, NodeUnavailable(f"{node} sent an empty answer"))
    for op, answer in zip(ops, answers, strict=False):  # omitted keys are requested in the next round
        if isinstance(answer, TanghuluError):
            _holder_failed(context, op, node, answer)
            continue
        found, value = answer
        op.from_ssd = found.from_ssd
        if value is not None:
            if not _take_inline(op, found, value):  # the node is notified, as if it had been pinned
                pinned.append(_Pinned(op, node, found, error=mismatch(op.key, node, found)))
        else:
            context.leases.hold(node, found.lease_id)
            pinned.append(_Pinned(op, node, found))


def _found(reply: GetReply, data: memoryview) -> Iterator[tuple[Found, memoryview | None] | TanghuluError]:
    """Yield the answer to GET, one per key, with the value if it came inline."""
    position = 0
    for item in reply.items:
        if isinstance(item, Failure):
            yield item.error
        elif item.lease_id:
            yield item, None
        else:
            yield item, data[position : position + item.size_bytes]
            position += item.size_bytes


def _node_failed(
    context: Context, deadline: Deadline, node: PeerId, ops: Sequence[GetOp], error: TanghuluError
) -> None:
    if isinstance(error, NodeUnavailable):
        context.nodes.expire()
    is_over = isinstance(error, DeadlineExceeded) and deadline.remaining_s() <= 0
    for op in ops:
        if is_over:
            op.result = error
        else:
            _holder_failed(context, op, node, error)


def _holder_failed(context: Context, op: GetOp, node: PeerId, error: TanghuluError) -> None:
    """Try the next holder; the last holder's error stays, unless it was ChunkNotFound."""
    op.tried.add(node)
    op.holders.remove(node)
    context.locations.discard(op.key, node)
    if not isinstance(error, ChunkNotFound):
        op.failure = error


def _take_inline(op: GetOp, found: Found, value: memoryview) -> bool:
    """Take the inline value as the result; False if it does not match its checksums."""
    if not sums.matches(value, found.checksums):
        return False
    if op.part is not None:
        ranges.deliver(op, found.version, found.size_bytes, 0, value)
    elif op.buffer is None:
        op.result = Chunk(op.key, found.version, value)
    elif not too_small(op, found.size_bytes):
        op.buffer.view(0, found.size_bytes)[:] = value
        op.result = found.size_bytes
    return True


# --- values pinned on their node


def _read_pinned(context: Context, pinned: list[_Pinned]) -> Logic[None]:
    requests: list[TransferRequest] = []
    moving: list[_Pinned] = []
    links: dict[tuple[PeerId, bool], NodeLink | TanghuluError] = {}
    for each in pinned:
        if each.error is not None:
            continue
        where = (each.node, each.found.copies_only)
        if where not in links:
            links[where] = yield OpenSegment(*where)
        link = links[where]
        if isinstance(link, TanghuluError):
            each.error = link
            continue
        span = ranges.covering_span(each.op, each.found.size_bytes, each.found.checksums)
        if span is None:
            continue
        each.begin, each.end = span
        if each.op.buffer is None and not each.op.pieces and link.view is not None:
            _look_at(context, each, link)
        else:
            parts = _requests(context, each, link)
            requests += parts
            moving += [each] * len(parts)
    for start, part in portions(requests):
        errors, _ = yield Transfer(part)
        for each, error in zip(moving[start : start + len(part)], errors, strict=True):
            each.error = each.error or error
            each.num_moving -= 1
            if not each.num_moving and each.error is None:
                _take_moved(each)
    yield from _finish(context, pinned, links)


def _look_at(context: Context, each: _Pinned, link: NodeLink) -> None:
    """Return the node's own bytes to the caller without a copy, and keep the lease."""
    found, node = each.found, each.node
    assert link.view is not None
    covered = link.view[found.offset + each.begin : found.offset + each.end]
    if not sums.matches_from(covered, found.checksums, each.begin):
        each.error = mismatch(each.op.key, node, found)
        return
    span = ranges.wanted_span(each.op, found.size_bytes)
    assert span is not None, "it was within before"
    leases, lease_id = context.leases, found.lease_id
    address, length = link.address + found.offset + span[0], span[1] - span[0]
    memory = LeasedMemory(address, length, link.view, lambda: leases.drop(node, lease_id))
    each.op.result = Chunk(each.op.key, found.version, np.asarray(memory), context.flush)
    each.keeps_lease = True


def _requests(context: Context, each: _Pinned, link: NodeLink) -> list[TransferRequest]:
    op, found, length = each.op, each.found, each.end - each.begin
    if op.pieces:
        buffers = op.pieces
    elif op.buffer is not None and ranges.wanted_span(op, found.size_bytes) == (each.begin, each.end):
        buffers = [op.buffer]
    else:
        buffers = [Buffer(context.memory.take(length))]
    digest: ValueCheck | sums.RunningChecksums | None = op.value_check
    if op.value_check is not None:
        op.value_check.begin()
    elif found.checksums.parts:
        digest = each.running = sums.RunningChecksums(length, found.checksums.part_bytes)
    at, made, arrived = found.offset + each.begin, list[TransferRequest](), list[memoryview]()
    for buffer in buffers:
        size = min(buffer.size_bytes, length)
        if size:
            made.append(TransferRequest(Opcode.READ, buffer, link.remote, at, size, 0, found.lease_id, digest=digest))
            arrived.append(buffer.view(0, size))
        at, length = at + size, length - size
    each.arrived, each.num_moving = arrived, len(made)
    return made


def _take_moved(each: _Pinned) -> None:
    op, found = each.op, each.found
    if not each.matches():
        each.error = mismatch(op.key, each.node, found)
    elif op.pieces or (op.buffer is not None and each.arrived[0].obj is op.buffer.memory.obj):
        op.result = sum(map(len, each.arrived))
    else:
        ranges.deliver(op, found.version, found.size_bytes, each.begin, each.arrived[0].toreadonly())


def _finish(
    context: Context, pinned: list[_Pinned], links: dict[tuple[PeerId, bool], NodeLink | TanghuluError]
) -> Logic[None]:
    """Return the leases, report corrupt chunks, send failed gets on to their next holder."""
    calls: list[tuple[PeerId, messages.AnyCall]] = []
    for node in dict.fromkeys(each.node for each in pinned):
        own = [each for each in pinned if each.node == node]
        corrupt = [each.op.key for each in own if isinstance(each.error, ChecksumMismatch)]
        leases = [each.found.lease_id for each in own if each.found.lease_id and not each.keeps_lease]
        link = links.get((node, own[0].found.copies_only))
        by_mapping = isinstance(link, NodeLink) and link.view is not None
        num_bytes = sum(each.end - each.begin for each in own if each.error is None) if by_mapping else 0
        if leases or corrupt:
            calls.append((node, methods.UNPIN.call(UnpinRequest(leases, num_bytes, corrupt))))
            for lease_id in leases:
                context.leases.released(node, lease_id)
            for each in own:
                each.given_back = True
        for each in own:
            if isinstance(each.error, LeaseExpired) and each.op.num_expired < MAX_PINNED_AGAIN:
                each.op.num_expired += 1  # too slow, or the connection broke in between: the holder still has it
            elif each.error is not None:
                _holder_failed(context, each.op, node, each.error)
    if calls:
        yield Notify(calls)


def not_found(key: str) -> ChunkNotFound:
    """Return the error for a key held by no live node."""
    return ChunkNotFound(f"no live node holds {key!r}")


def mismatch(key: str, node: PeerId, found: Found) -> ChecksumMismatch:
    """Build the ChecksumMismatch for bytes damaged on the way, or at their holder."""
    return ChecksumMismatch(
        f"the {found.size_bytes} bytes of {key!r} from {node} do not match the checksums of the put"
    )
