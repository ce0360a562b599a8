"""How values are written: choose nodes, send small values in the request, reserve + write + commit for large ones.

Pure logic for the shells. Items go through in bounded slices. Within a slice one *round* sends every item to as many of
its candidates as it still lacks replicas; all nodes are asked at once, all transfers move as one batch. What failed
goes into the next round with its next candidates.
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
from tanghulu.store.client.logic import context as common
from tanghulu.store.client.logic import messages, streams
from tanghulu.store.client.logic import write_buffers as desks
from tanghulu.store.client.logic.context import Context
from tanghulu.store.client.logic.effects import MASTER, Ask, Deadline, Logic, PeerId, Sleep
from tanghulu.store.client.logic.putting import Putting, checksums_of, take_results
from tanghulu.store.client.logic.writes import Write, begin_ahead, take_reservations, write_all
from tanghulu.store.client.model import PutOptions
from tanghulu.store.protocol.types import MAX_INLINE_BYTES, NewChunk
from tanghulu.types import format_size

#: One slice of put_many: what is reserved and in flight at once.
SLICE_BYTES = 64 << 20
SLICE_ITEMS = 1024
#: One PUT request with small values.
INLINE_CALL_BYTES = 1 << 20
#: Before a put that exceeded its tenant's quota everywhere is tried again.
QUOTA_PAUSE_S = 0.02
#: After these a put is tried on another node; other errors are its result.
_ELSEWHERE = (NodeUnavailable, StoreFull, LeaseExpired, TransferFailed, Overloaded)


def put_one(context: Context, deadline: Deadline, item: Putting, options: PutOptions) -> Logic[None]:
    """Put one item, the commonest call by far: a small value for one node that takes it needs no grouping."""
    if not context.nodes.is_fresh(context.clock.now_s()):
        yield from common.refresh_nodes(context, deadline)
    new = item.new
    local = context.nodes.local_for(new.key, new.size_bytes)
    alone = bool(local) and item.replicas == 1 and options.prefer_node is None
    if alone and options.visible and not item.pieces and desks.suits(new, options.part_bytes):
        existed = yield from desks.put(context, deadline, local[0], new, item.value)
        if existed is not None:
            _put_alone(context, item, local[0], existed)
            return
    if alone:
        item.candidates = local
    else:
        yield from _choose_nodes(context, (item,), options)
    if item.candidates and item.replicas == 1 and not item.done:
        yield from _put_at(context, deadline, item, options)
    yield from _finish(context, deadline, (item,), options)
    _remember(context, item)


def _put_at(context: Context, deadline: Deadline, item: Putting, options: PutOptions) -> Logic[None]:
    """Put a single item at its first candidate, if it goes inside a message; else, and if that fails, it stays open."""
    node, others = item.candidates[0], item.candidates[1:]
    inline_bytes = context.inline_bytes(node)
    if item.new.size_bytes > inline_bytes:
        return
    if item.new.size_bytes > MAX_INLINE_BYTES:
        pieces = item.pieces or (item.value,)
        existed = yield from streams.put(context, deadline, node, item.new, pieces, options)
        if existed is not None:
            _put_alone(context, item, node, existed)
            return
    item.candidates = others
    call = _put_call((item,), options, _patience_ms(deadline, len(others)))
    (outcome,) = yield Ask(((node, call),))
    take_results(context, node, (item,), outcome)
    _conclude(item)


def _put_alone(context: Context, item: Putting, node: PeerId, existed: bool) -> None:
    """A single put at ``node`` is over."""
    item.existed, item.done = existed, True
    if not existed:
        item.placed.append(node)
        _remember(context, item)


def put_all(context: Context, deadline: Deadline, items: Sequence[Putting], options: PutOptions) -> Logic[None]:
    """Put every item; their ``status()`` then tells what became of each."""
    yield from common.refresh_nodes(context, deadline)
    for batch in _slices(items):
        yield from _put_at_desks(context, deadline, batch, options)
        rest = [item for item in batch if not item.done]
        yield from _choose_nodes(context, rest, options)
        yield from _finish(context, deadline, rest, options)
        for item in rest:
            _remember(context, item)


def _put_at_desks(context: Context, deadline: Deadline, items: Sequence[Putting], options: PutOptions) -> Logic[None]:
    """What can be put by way of desks, node by node; the rest stays open."""
    by_node: dict[PeerId, list[Putting]] = {}
    if not options.visible or options.prefer_node is not None or options.replicas > 1:
        return
    for item in items:
        local = context.nodes.local_for(item.new.key, item.new.size_bytes)
        if local and context.desks.mapped(local[0]) and not item.pieces and desks.suits(item.new, options.part_bytes):
            by_node.setdefault(local[0], []).append(item)
    for node, own in by_node.items():
        outcomes = yield from desks.put_many(context, deadline, node, [(item.new, item.value) for item in own])
        for item, existed in zip(own, outcomes, strict=True):
            if existed is not None:
                _put_alone(context, item, node, existed)


def _finish(context: Context, deadline: Deadline, items: Sequence[Putting], options: PutOptions) -> Logic[None]:
    """Rounds until every item is done."""
    while open_items := [item for item in items if not item.done]:
        yield from _ask_again(deadline, open_items)
        ready = [item for item in open_items if not item.done]
        if ready:
            yield from _round(context, deadline, ready, options)
        for item in ready:
            _conclude(item)


def _ask_again(deadline: Deadline, items: Sequence[Putting]) -> Logic[None]:
    """Whom only quotas stand in the way, that of its tenant: what was written beside it can be evicted soon."""
    waiting = [item for item in items if item.over_quota and not item.candidates]
    if waiting and len(waiting) == len(items) and deadline.remaining_s() > QUOTA_PAUSE_S:
        yield Sleep(QUOTA_PAUSE_S)
    for item in waiting:
        item.done = deadline.remaining_s() <= QUOTA_PAUSE_S
        item.candidates, item.over_quota = item.over_quota, []


def _remember(context: Context, item: Putting) -> None:
    if item.placed:
        context.locations.set(item.new.key, tuple(item.placed))


def _patience_ms(deadline: Deadline, num_others: int) -> int:
    """How long a node may make us wait for room: less if there are others to try after it."""
    return max(1, deadline.remaining_ms() // (1 + min(num_others, 2)))


def _slices(items: Sequence[Putting]) -> Iterator[Sequence[Putting]]:
    start = num_bytes = 0
    for position, item in enumerate(items):
        num_bytes += item.new.size_bytes
        if position > start and (num_bytes > SLICE_BYTES or position - start >= SLICE_ITEMS):
            yield items[start:position]
            start, num_bytes = position, item.new.size_bytes
    if start < len(items):
        yield items[start:]


def _conclude(item: Putting) -> None:
    """An item is done with enough replicas, as a hit, with a final error, or without candidates."""
    final_error = item.error is not None and not isinstance(item.error, _ELSEWHERE)
    exhausted = not (item.candidates or (item.over_quota and not item.placed))
    item.done = item.existed or len(item.placed) >= item.replicas or final_error or exhausted


# --- choosing nodes


def _choose_nodes(context: Context, items: Sequence[Putting], options: PutOptions) -> Logic[None]:
    largest = context.nodes.largest_capacity_bytes
    for item in items:
        size = item.new.size_bytes
        if largest and size > largest:
            item.error, item.done = _too_large(item.new, largest), True
            continue
        item.candidates = context.nodes.local_for(item.new.key, size)
        if options.prefer_node is None and item.replicas == 1 and item.candidates:
            continue
        if options.prefer_node is not None:
            item.candidates.insert(0, PeerId(options.prefer_node))
        item.candidates += yield from _advice(context, size, options)
        item.candidates = list(dict.fromkeys(item.candidates))
        if item.replicas > 1:
            item.candidates = context.nodes.spread(item.candidates)


def _too_large(new: NewChunk, largest: int) -> InvalidRequest:
    return InvalidRequest(
        f"value of {new.key!r} has {format_size(new.size_bytes)}, the largest node holds {format_size(largest)}"
    )


def _advice(context: Context, size_bytes: int, options: PutOptions) -> Logic[tuple[PeerId, ...]]:
    now_s = context.clock.now_s()
    advice = context.nodes.advice(size_bytes, now_s)
    if advice is not None and len(advice) >= options.replicas:
        return advice
    call = messages.place(size_bytes, options.replicas, options.prefer_node or "", context.place)
    (outcome,) = yield Ask([(MASTER, call)])
    if isinstance(outcome, TanghuluError):  # choose by ourselves among those that we know
        return tuple(context.nodes.ids())
    nodes = messages.node_views(outcome)
    context.nodes.learn(nodes)
    ids = tuple(PeerId(node.id) for node in nodes)
    context.nodes.advise(size_bytes, ids, now_s)
    return ids


# --- one round


def _round(context: Context, deadline: Deadline, items: list[Putting], options: PutOptions) -> Logic[None]:
    small: dict[PeerId, list[Putting]] = {}
    large: dict[PeerId, list[Putting]] = {}
    num_others = 0
    for item in items:
        item.error = None
        wanted = item.replicas - len(item.placed)
        chosen, item.candidates = item.candidates[:wanted], item.candidates[wanted:]
        num_others = max(num_others, len(item.candidates))
        for node in chosen:
            # several large ones travel together, and share an announcement
            inline_bytes = context.inline_bytes(node) if len(items) == 1 else MAX_INLINE_BYTES
            (small if item.new.size_bytes <= inline_bytes else large).setdefault(node, []).append(item)
    deadline_ms = _patience_ms(deadline, num_others)
    puts = [(node, part) for node, part_items in small.items() for part in _inline_calls(part_items)]
    calls = [(node, _put_call(part, options, deadline_ms)) for node, part in puts]
    reserves = list(large.items())
    calls += [(node, messages.reserve([i.new for i in part], deadline_ms)) for node, part in reserves]
    ahead = begin_ahead(reserves[0][1], options) if reserves and len(calls) == 1 else None
    outcomes = yield Ask(calls, None, ahead)
    for (node, part), outcome in zip(puts, outcomes[: len(puts)], strict=True):
        take_results(context, node, part, outcome)
    writes: list[Write] = []
    for (node, part), outcome in zip(reserves, outcomes[len(puts) :], strict=True):
        writes += take_reservations(context, node, part, outcome)
    if writes:
        yield from write_all(context, deadline, writes, options)


def _put_call(items: Sequence[Putting], options: PutOptions, deadline_ms: int) -> messages.AnyCall:
    for item in items:
        if not item.new.checksums.parts:
            item.new = item.new.with_checksums(checksums_of(item, options))
    pieces = [piece for item in items for piece in item.pieces or (item.value,)]
    return messages.put([item.new for item in items], pieces, options.visible, deadline_ms)


def _inline_calls(items: list[Putting]) -> Iterator[list[Putting]]:
    part: list[Putting] = []
    num_bytes = 0
    for item in items:
        if part and num_bytes + item.new.size_bytes > INLINE_CALL_BYTES:
            yield part
            part, num_bytes = [], 0
        part.append(item)
        num_bytes += item.new.size_bytes
    yield part
