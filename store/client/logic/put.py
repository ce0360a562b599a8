"""Writes: choose nodes, and bring every value to as many of them as it has replicas. Pure.

``store.client.logic.plan`` chooses each value's route. Items are processed in bounded slices. Within a slice one
*round* sends every item to as many of its candidates as it still lacks replicas; all nodes are called at once, all
transfers move as one batch. Failed items enter the next round with their next candidates. A single item goes to its
first candidate without the grouping of a round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tanghulu.errors import (
    InvalidRequest,
    LeaseExpired,
    NodeUnavailable,
    Overloaded,
    StoreFull,
    TanghuluError,
    TransferFailed,
)
from tanghulu.store.client.logic import directory_client, messages
from tanghulu.store.client.logic.carriers import (
    Filling,
    begin_ahead,
    end_reservations,
    put_in_buffer,
    take_reservations,
    transfer_all,
)
from tanghulu.store.client.logic.commit import PutOp, take_results
from tanghulu.store.client.logic.context import Context
from tanghulu.store.client.logic.effects import MASTER, CallPeers, Deadline, Logic, PeerId, Sleep
from tanghulu.store.client.logic.plan import Carrier, Route, plan
from tanghulu.store.client.model import NodeView, PutOptions
from tanghulu.store.protocol import methods
from tanghulu.store.protocol.directory_messages import NodesRequest, PlaceRequest
from tanghulu.store.protocol.messages import PutRequest, ReserveRequest
from tanghulu.store.protocol.types import NewChunk
from tanghulu.types import format_size

#: One slice of put_many: values reserved and in flight at once.
SLICE_BYTES = 64 << 20
SLICE_ITEMS = 1024
#: One PUT request with small values.
INLINE_CALL_BYTES = 1 << 20
#: Pause before a put that exceeded its tenant's quota everywhere is retried.
QUOTA_PAUSE_S = 0.02
#: Errors after which a put is tried on another node; other errors are its result.
_ELSEWHERE = (NodeUnavailable, StoreFull, LeaseExpired, TransferFailed, Overloaded)


def put_one(context: Context, deadline: Deadline, op: PutOp, options: PutOptions) -> Logic[None]:
    """Put one item, by far the most frequent call: alone at its first candidate, and after a failure in rounds.

    A value not accepted by a write buffer goes to the node by another route, which reports the reason.
    """
    nodes, new = context.nodes, op.new
    if not nodes.is_fresh(context.clock.now_s()):
        yield from directory_client.refresh_nodes(context, deadline)
    op.candidates = nodes.local_for(new.key, new.size_bytes)
    if not op.candidates or options.replicas > 1 or options.prefer_node is not None:
        yield from _choose_nodes(context, (op,), options)
    tried = False
    while op.candidates and options.replicas == 1 and not op.done:
        node = op.candidates[0]
        access = context.access(node, context.clock.now_s())
        carrier = plan(new, options, access, in_round=tried, in_pieces=bool(op.pieces)).carrier
        tried = True
        if carrier is Carrier.BUFFER:
            yield from put_in_buffer(context, deadline, node, (op,))
        elif carrier is Carrier.INLINE:
            del op.candidates[0]
            room_ms = deadline.patience_ms(len(op.candidates))
            call = _put_call((op,), options, room_ms, deadline.remaining_ms())
            (answer,) = yield CallPeers(((node, call),))
            take_results(context, node, (op,), answer)
            _conclude(op)
            break
        else:  # a transfer takes a round
            break
    if not op.done:
        yield from _finish(context, deadline, (op,), options)
    if isinstance(op.error, NodeUnavailable) and not op.placed:
        yield from _try_newcomers(context, deadline, (op,), options)
    if op.placed:
        context.locations.set(new.key, tuple(op.placed))


def put_all(context: Context, deadline: Deadline, ops: Sequence[PutOp], options: PutOptions) -> Logic[None]:
    """Put every item; ``status()`` of each then reports its outcome."""
    yield from directory_client.refresh_nodes(context, deadline)
    for batch in _slices(ops, SLICE_BYTES):
        yield from _put_in_buffers(context, deadline, batch, options)
        rest = [op for op in batch if not op.done]
        yield from _choose_nodes(context, rest, options)
        yield from _finish(context, deadline, rest, options)
        yield from _try_newcomers(context, deadline, rest, options)
        for op in batch:
            if op.placed:
                context.locations.set(op.new.key, tuple(op.placed))


def _put_in_buffers(context: Context, deadline: Deadline, ops: Sequence[PutOp], options: PutOptions) -> Logic[None]:
    """Put items that fit into write buffers, node by node; the rest stays open."""
    by_node: dict[PeerId, list[PutOp]] = {}
    now_s, several = context.clock.now_s(), len(ops) > 1
    for op in ops:
        local = context.nodes.local_for(op.new.key, op.new.size_bytes)
        if local:
            access = context.access(local[0], now_s)
            route = plan(op.new, options, access, several=several, in_pieces=bool(op.pieces))
            if route.carrier is Carrier.BUFFER:
                by_node.setdefault(local[0], []).append(op)
    for node, own in by_node.items():
        yield from put_in_buffer(context, deadline, node, own)


def _finish(context: Context, deadline: Deadline, ops: Sequence[PutOp], options: PutOptions) -> Logic[None]:
    """Run rounds until every item is done."""
    while open_ops := [op for op in ops if not op.done]:
        yield from _retry_over_quota(deadline, open_ops)
        ready = [op for op in open_ops if not op.done]
        if ready:
            yield from _round(context, deadline, ready, options)
        for op in ready:
            _conclude(op)


def _try_newcomers(context: Context, deadline: Deadline, ops: Sequence[PutOp], options: PutOptions) -> Logic[None]:
    """Put items without a live node at nodes missing from the list so far, if the master has any."""
    lost = [op for op in ops if isinstance(op.error, NodeUnavailable) and not op.placed]
    if not lost:
        return
    before = frozenset(context.nodes.ids())
    context.nodes.expire()
    yield from directory_client.refresh_nodes(context, deadline)
    if before.issuperset(context.nodes.ids()):
        return
    for op in lost:
        op.done = False
    yield from _choose_nodes(context, lost, options)
    for op in lost:
        op.candidates = [node for node in op.candidates if node not in before]
        op.done = op.done or not op.candidates
    yield from _finish(context, deadline, lost, options)


def _retry_over_quota(deadline: Deadline, ops: Sequence[PutOp]) -> Logic[None]:
    """Retry items that failed only on their tenant's quota: values written beside them can be evicted soon."""
    waiting = [op for op in ops if op.over_quota and not op.candidates]
    if waiting and len(waiting) == len(ops) and deadline.remaining_s() > QUOTA_PAUSE_S:
        yield Sleep(QUOTA_PAUSE_S)
    for op in waiting:
        op.done = deadline.remaining_s() <= QUOTA_PAUSE_S
        op.candidates, op.over_quota = op.over_quota, []


def _slices(ops: Sequence[PutOp], max_bytes: int) -> Iterator[Sequence[PutOp]]:
    """Cut ``ops`` into runs of at most SLICE_ITEMS and ``max_bytes``; a larger item is a run of its own."""
    start = num_bytes = 0
    for position, op in enumerate(ops):
        num_bytes += op.new.size_bytes
        if position > start and (num_bytes > max_bytes or position - start >= SLICE_ITEMS):
            yield ops[start:position]
            start, num_bytes = position, op.new.size_bytes
    if start < len(ops):
        yield ops[start:]


def _conclude(op: PutOp) -> None:
    """Finish an item that has enough replicas, is a hit, has a final error, or has no candidates."""
    final_error = op.error is not None and not isinstance(op.error, _ELSEWHERE)
    exhausted = not (op.candidates or (op.over_quota and not op.placed))
    op.done = op.existed or len(op.placed) >= op.new.replicas or final_error or exhausted


# --- choosing nodes


def _choose_nodes(context: Context, ops: Sequence[PutOp], options: PutOptions) -> Logic[None]:
    largest = context.nodes.largest_capacity_bytes
    if options.prefer_node is not None:
        yield from _require_known(context, PeerId(options.prefer_node))
    for op in ops:
        size = op.new.size_bytes
        if largest and size > largest:
            op.error, op.done = _too_large(op.new, largest), True
            continue
        op.candidates = context.nodes.local_for(op.new.key, size)
        if options.prefer_node is None and options.replicas == 1 and op.candidates:
            continue
        if options.prefer_node is not None:
            op.candidates.insert(0, PeerId(options.prefer_node))
        op.candidates += yield from _advice(context, size, options)
        op.candidates = list(context.nodes.trusted_first(list(dict.fromkeys(op.candidates))))
        if options.replicas > 1:
            op.candidates = context.nodes.spread(op.candidates)


def _require_known(context: Context, node: PeerId) -> Logic[None]:
    """Raise InvalidRequest for an id that never was a node's; a departed node may be preferred."""
    if context.nodes.has_seen(node):
        return
    reply = yield from directory_client.call_one(MASTER, methods.NODES.call(NodesRequest()))
    known = directory_client.take_nodes(context, reply)
    if not reply.message.rebuilding and not context.nodes.has_seen(node):
        names = ", ".join(view.id for view in known) or "none"
        raise InvalidRequest(f"prefer_node={node!r}: there is no such node; known nodes: {names}")


def _too_large(new: NewChunk, largest: int) -> InvalidRequest:
    return InvalidRequest(
        f"value of {new.key!r} has {format_size(new.size_bytes)}, the largest node holds {format_size(largest)}"
    )


def _advice(context: Context, size_bytes: int, options: PutOptions) -> Logic[tuple[PeerId, ...]]:
    now_s = context.clock.now_s()
    advice = context.nodes.advice(size_bytes, now_s)
    if advice is not None and len(advice) >= options.replicas:
        return advice
    request = PlaceRequest(size_bytes, options.replicas, options.prefer_node or "", context.place)
    (answer,) = yield CallPeers([(MASTER, methods.PLACE.call(request))], waits=False)
    if isinstance(answer, TanghuluError):  # choose among the known nodes ourselves
        return tuple(context.nodes.ids())
    nodes: list[NodeView] = answer.message.nodes
    context.nodes.learn(nodes)
    ids = tuple(PeerId(node.id) for node in nodes)
    context.nodes.advise(size_bytes, ids, now_s)
    return ids


# --- one round


def _round(context: Context, deadline: Deadline, ops: list[PutOp], options: PutOptions) -> Logic[None]:
    inline: dict[PeerId, list[PutOp]] = {}
    large: dict[PeerId, list[tuple[PutOp, Route]]] = {}
    num_others, now_s = 0, context.clock.now_s()
    for op in ops:
        op.error = None
        wanted = op.new.replicas - len(op.placed)
        chosen, op.candidates = op.candidates[:wanted], op.candidates[wanted:]
        num_others = max(num_others, len(op.candidates))
        for node in chosen:
            route = plan(op.new, options, context.access(node, now_s), several=len(ops) > 1, in_round=True)
            if route.carrier is Carrier.INLINE:
                inline.setdefault(node, []).append(op)
            else:
                large.setdefault(node, []).append((op, route))
    deadline_ms = deadline.patience_ms(num_others)
    puts = [(node, part) for node, own in inline.items() for part in _slices(own, INLINE_CALL_BYTES)]
    calls = [(node, _put_call(part, options, deadline_ms, deadline.remaining_ms())) for node, part in puts]
    calls += [
        (node, methods.RESERVE.call(ReserveRequest([op.new for op, _ in own], deadline_ms, options.visible)))
        for node, own in large.items()
    ]
    ahead = None
    if large and len(calls) == 1:
        ((node, own),) = large.items()
        ahead = begin_ahead([op for op, _ in own], options)
    answers = yield CallPeers(calls, None, ahead)
    for (node, part), answer in zip(puts, answers[: len(puts)], strict=True):
        take_results(context, node, part, answer)
    fillings: list[Filling] = []
    try:
        for (node, own), answer in zip(large.items(), answers[len(puts) :], strict=True):
            take_reservations(context, node, own, answer, fillings)
        if fillings:
            yield from transfer_all(context, deadline, fillings, options)
    finally:  # an abandoned call keeps no range either
        end_reservations(context, fillings)


def _put_call(ops: Sequence[PutOp], options: PutOptions, room_ms: int, master_ms: int) -> messages.AnyCall:
    """Build the PUT with the values of ``ops``, concatenated."""
    news: list[NewChunk] = []
    pieces: list[memoryview] = []
    for op in ops:
        if not op.new.checksums.parts:
            op.new = op.new.with_checksums(op.checksums(options.part_bytes))
        news.append(op.new)
        pieces += op.pieces or (op.value,)
    return methods.PUT.call(PutRequest(news, options.visible, room_ms, master_ms), pieces)
