"""Directory calls at the start of operations: owners of keys, the list of nodes, locations of chunks. Pure.

A call about keys goes to the leading master, or, once several masters are known to share the keys, to the owner of each
(``key_owners``); while keys move, or their owner is away, it waits for their next owner.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tanghulu.errors import KeysMoved, TanghuluError
from tanghulu.runtime.clock import Backoff
from tanghulu.store.client.logic import messages
from tanghulu.store.client.logic.context import Context
from tanghulu.store.client.logic.effects import MASTER, CallPeers, Deadline, Logic, PeerId, Sleep
from tanghulu.store.client.logic.key_owners import SplitCall
from tanghulu.store.client.logic.placement import ListVersion
from tanghulu.store.client.model import NodeView
from tanghulu.store.protocol import methods
from tanghulu.store.protocol.directory_messages import NodesReply, NodesRequest
from tanghulu.store.protocol.messages import LocateRequest, MastersRequest

#: Seconds for a new master to learn of a first node.
_NODELESS_TRIES = 12
_NODELESS_PAUSE_S, _NODELESS_MOST_S = 0.05, 0.25
#: Pause between two questions for a key unknown to a rebuilding master.
_REBUILDING_PAUSE_S, _REBUILDING_MOST_S = 0.05, 0.5
#: Pause between two questions for keys whose owner is away, or not known yet.
_UNOWNED_PAUSE_S, _UNOWNED_MOST_S = 0.05, 0.25
#: Longest wait for the map: another master may have it.
_MAP_S = 1.0
#: Keys in one call to the master.
KEYS_PER_LOCATE = 8192


def rebuilding_backoff(context: Context) -> Backoff:
    """Return the pauses of a call that waits until a rebuilding master knows its keys."""
    return Backoff(_REBUILDING_PAUSE_S, _REBUILDING_MOST_S, context.rng)


def patience(context: Context, deadline: Deadline) -> Deadline:
    """Return the time until which an operation that begins now waits for a rebuilding master."""
    return deadline if context.waits_for_master else deadline.within(0.0)


def call_one(peer: PeerId, call: messages.AnyCall, *, waits: bool = True) -> Logic[messages.AnyReply]:
    """Make one call to ``peer``; raises its typed error. ``waits``: see CallPeers."""
    (outcome,) = yield CallPeers([(peer, call)], waits=waits)
    if isinstance(outcome, TanghuluError):
        raise outcome
    reply: messages.AnyReply = outcome
    return reply


def call_owners(
    context: Context, deadline: Deadline, call: messages.AnyCall, *, waits: bool = True
) -> Logic[messages.AnyReply]:
    """Make one call to the masters that own its keys; return their joined answers or raise their typed error.

    ``waits``: see CallPeers. While keys move, or their owner is away, this waits for their next owner.
    """
    if context.masters.owners is None:
        (outcome,) = yield CallPeers([(MASTER, call)], waits=waits)
        if not isinstance(outcome, TanghuluError):
            reply: messages.AnyReply = outcome
            return reply
        if not isinstance(outcome, KeysMoved):
            raise outcome
        yield from refresh_owners(context, MASTER)
    return (yield from call_each_owner(context, deadline, call, waits=waits))


def call_each_owner(
    context: Context, deadline: Deadline, call: messages.AnyCall, *, waits: bool
) -> Logic[messages.AnyReply]:
    """Do as ``call_owners``, with several known masters."""
    split, backoff = SplitCall(call), Backoff(_UNOWNED_PAUSE_S, _UNOWNED_MOST_S, context.rng)
    waits = waits and context.waits_for_master
    while True:
        outcomes = yield CallPeers(split.calls(context.masters.owners), waits=waits)
        failure = split.answered(outcomes, context.masters.owners)
        if failure is None:
            return split.reply()
        knows_more = yield from refresh_owners(context, split.informant)
        if knows_more and deadline.remaining_s() > 0:
            continue
        pause_s = backoff.pause_s()
        if not waits or deadline.remaining_s() <= pause_s:
            raise failure
        yield Sleep(pause_s)


def refresh_owners(context: Context, informant: PeerId) -> Logic[bool]:
    """Get the map from ``informant``, or from another master if it does not answer; return whether it is newer."""
    known = context.masters.owners
    others = [] if known is None else sorted({MASTER, *known.peers} - {informant})
    for peer in (informant, *([context.rng.choice(others)] if others else ())):
        request = MastersRequest.newer_than(None if known is None else known.map)
        (outcome,) = yield CallPeers([(peer, methods.MASTERS.call(request))], _MAP_S, waits=False)
        if not isinstance(outcome, TanghuluError):
            return context.take_masters(outcome.message)
    return False


def refresh_nodes(context: Context, deadline: Deadline | None = None, *, force: bool = False) -> Logic[None]:
    """Refresh the list of nodes if older than NODES_TTL_S; an old one suffices while the master is away.

    ``force``: the caller needs a node missing from the old list, so this waits for an absent master. While the master
    is new and without registered nodes, the call is repeated until ``deadline``, or for some seconds.
    """
    if not force and context.nodes.is_fresh(context.clock.now_s()):
        return
    tries = itertools.repeat(None) if deadline is not None else itertools.repeat(None, _NODELESS_TRIES)
    backoff = Backoff(_NODELESS_PAUSE_S, _NODELESS_MOST_S, context.rng)
    for _ in tries:
        waits = force or not context.nodes.ids()
        request = NodesRequest(*context.nodes.version, versioned=True)
        (outcome,) = yield CallPeers([(MASTER, methods.NODES.call(request))], waits=waits)
        if isinstance(outcome, TanghuluError):
            if context.nodes.ids():
                return
            raise outcome
        take_nodes(context, outcome)
        if context.nodes.ids() or not outcome.message.rebuilding:
            return
        pause_s = backoff.pause_s()
        if deadline is not None and deadline.remaining_s() <= pause_s:
            return
        yield Sleep(pause_s)


def take_nodes(context: Context, reply: messages.AnyReply) -> list[NodeView]:
    """Take the nodes in the answer to NODES. A rebuilding master does not know all: those known before stay."""
    message: NodesReply = reply.message
    if message.unchanged:
        context.nodes.confirm(context.clock.now_s())
        return context.nodes.all()
    known = {view.id for view in message.nodes}
    before = [view for view in context.nodes.all() if view.id not in known] if message.rebuilding else []
    version = ListVersion(message.version, message.master_generation)
    context.nodes.update([*message.nodes, *before], context.clock.now_s(), version)
    context.departed |= context.greeted.difference(context.nodes.ids())
    return message.nodes


def locate(
    context: Context, deadline: Deadline, keys: Sequence[str], *, waits: bool = True, removing: bool = False
) -> Logic[tuple[list[tuple[PeerId, ...]], bool]]:
    """Return (holders of each key by the master, nearest first; whether the master does not know all yet).

    ``removing``: see LocateRequest.
    """
    holders: list[tuple[tuple[PeerId, ...], int]] = []
    incomplete = False
    for start in range(0, len(keys), KEYS_PER_LOCATE):
        call = methods.LOCATE.call(LocateRequest(keys[start : start + KEYS_PER_LOCATE], False, removing))
        reply = yield from call_owners(context, deadline, call, waits=waits)
        found, not_ready = messages.locations(reply)
        holders += found
        incomplete = incomplete or not_ready
    mentioned = {node for nodes, _ in holders for node in nodes}
    if any(context.nodes.get(node) is None for node in mentioned):
        yield from refresh_nodes(context, force=True)
    local, trusted_first = context.nodes.local_ids(), context.nodes.trusted_first
    in_order = [_in_order(key, *found, local) for key, found in zip(keys, holders, strict=True)]
    return [trusted_first(nodes) for nodes in in_order], incomplete


def _in_order(key: str, nodes: tuple[PeerId, ...], num_warm: int, local: frozenset[PeerId]) -> tuple[PeerId, ...]:
    """Order holders: this host's first, and within each group those with the chunk in memory first.

    Among equals the order differs by key and process, to share the load. ``nodes`` begin with ``num_warm`` warm ones.
    """
    if len(nodes) < 2:
        return nodes
    cold = set(nodes[num_warm:])
    return tuple(sorted(nodes, key=lambda node: (node not in local, node in cold, hash((node, key)))))
