"""What all operations of one client share, and the steps that many of them begin with."""

from __future__ import annotations

import itertools
import secrets
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

from tanghulu.errors import KeysMoved, TanghuluError
from tanghulu.runtime.backoff import Backoff
from tanghulu.runtime.clock import Clock
from tanghulu.store.client.logic import messages
from tanghulu.store.client.logic.effects import (
    MASTER,
    CallPeers,
    Deadline,
    Logic,
    NodeLink,
    Notify,
    PeerId,
    Sleep,
    is_owner,
)
from tanghulu.store.client.logic.key_owners import KeyOwners, SplitCall
from tanghulu.store.client.logic.leases import Leases
from tanghulu.store.client.logic.placement import ListVersion, NodeTable
from tanghulu.store.client.logic.plan import Access
from tanghulu.store.client.logic.receive_memory import ReceiveMemory
from tanghulu.store.client.logic.write_buffers import MappedNode, OpenWriteBuffers
from tanghulu.store.client.model import NodeView
from tanghulu.store.protocol import methods
from tanghulu.store.protocol.directory_messages import NodesReply, NodesRequest
from tanghulu.store.protocol.messages import MastersReply, MastersRequest, Welcome
from tanghulu.store.protocol.terms import LeaseProofs, TermFence
from tanghulu.store.protocol.types import MAX_INLINE_BYTES, MAX_MESSAGE_BYTES

#: A new master is given so long to hear of a first node.
_NODELESS_TRIES = 12
_NODELESS_PAUSE_S, _NODELESS_MOST_S = 0.05, 0.25
#: Between two questions for a key that a rebuilding master does not know yet.
_REBUILDING_PAUSE_S, _REBUILDING_MOST_S = 0.05, 0.5
#: Between two questions for keys whose owner is away, or not known yet.
_UNOWNED_PAUSE_S, _UNOWNED_MOST_S = 0.05, 0.25
#: The map is not waited for any longer: another master may tell it.
_MAP_S = 1.0
#: Keys in one question to the master.
KEYS_PER_LOCATE = 8192
#: Of so many keys a client remembers where they are, in 20 MB; the master is asked for others.
MAX_LOCATIONS = 1 << 16
#: Nodes are told of that many reads at the latest.
REPORT_READS = 64


class LocationCache:
    """Least recently used keys are forgotten first. Safe to use from several threads."""

    def __init__(self) -> None:
        self._nodes: OrderedDict[str, tuple[PeerId, ...]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str) -> tuple[PeerId, ...]:
        """The nodes that held ``key`` when it was last heard of, nearest first; none if unknown."""
        with self._lock:
            nodes = self._nodes.get(key)
            if nodes is None:
                return ()
            self._nodes.move_to_end(key)
            return nodes

    def set(self, key: str, nodes: tuple[PeerId, ...]) -> None:
        """The master, or a put, says where ``key`` is."""
        with self._lock:
            self._nodes[key] = nodes
            self._nodes.move_to_end(key)
            if len(self._nodes) > MAX_LOCATIONS:
                self._nodes.popitem(last=False)

    def discard(self, key: str, node: PeerId) -> None:
        """``node`` turned out not to hold ``key``."""
        with self._lock:
            nodes = self._nodes.get(key, ())
            if node in nodes:
                rest = tuple(each for each in nodes if each != node)
                if rest:
                    self._nodes[key] = rest
                else:
                    del self._nodes[key]

    def forget(self, key: str) -> None:
        """``key`` was removed."""
        with self._lock:
            self._nodes.pop(key, None)

    def __len__(self) -> int:
        return len(self._nodes)


class Reads:
    """What this client read without asking a node, so that the nodes hear of it: eviction goes by what is read.

    A read by means of a node's shared index costs no message. The node is told of such reads a few at a time: with the
    ``REPORT_READS``-th, or before the next call that is not a get. ``noted`` are (node, key, size); ``due`` says
    that they should be told even if nothing else has to be. Every step is one operation of a deque: safe from any
    thread.
    """

    def __init__(self) -> None:
        self.noted: deque[tuple[PeerId, str, int]] = deque()
        self.due = False

    def note(self, node: PeerId, key: str, size_bytes: int) -> None:
        """``key`` was read on ``node``."""
        self.noted.append((node, key, size_bytes))
        self.due = len(self.noted) >= REPORT_READS

    def take(self) -> dict[PeerId, tuple[list[str], int]]:
        """(keys in order, bytes) by node; counts as told."""
        self.due = False
        taken: dict[PeerId, tuple[list[str], int]] = {}
        while self.noted:
            try:
                node, key, size = self.noted.popleft()
            except IndexError:  # another thread was faster
                break
            keys, num_bytes = taken.get(node, ([], 0))
            keys.append(key)
            taken[node] = keys, num_bytes + size
        return taken


def _versions() -> Iterator[int]:
    # No two puts have the same. Random beginnings keep the versions of different clients apart; 2**20 puts per client
    # fit before they could meet.
    return itertools.count(secrets.randbits(43) << 20 | 1)


@dataclass
class Context:
    """One client's memory between operations. ``mapped``: those nodes of this host whose memory is mapped.

    ``greeted`` are the nodes to which the driver keeps something open; what it has of ``departed`` ones it is to close,
    for an open mapping keeps all memory of a process that is gone.

    ``wait_s``: how long one call may wait at the master. ``waits_for_master``: whether operations wait until a
    master that is rebuilding knows their keys. ``owners`` None: one master has been heard of, and is asked for
    everything. ``streams``: values of up to 1 MiB travel
    inside messages where memory is not mapped; not if they are wanted to move by verbs or UCX.
    """

    host_id: str
    place: str
    clock: Clock
    nodes: NodeTable
    maps_memory: bool = True
    wait_s: float = 10.0
    streams: bool = True
    waits_for_master: bool = True
    locations: LocationCache = field(default_factory=LocationCache)
    leases: Leases = field(default_factory=Leases)
    reads: Reads = field(default_factory=Reads)
    memory: ReceiveMemory = field(default_factory=ReceiveMemory)
    mapped: dict[PeerId, MappedNode] = field(default_factory=dict)
    write_buffers: OpenWriteBuffers = field(default_factory=OpenWriteBuffers)
    fence: TermFence = field(default_factory=TermFence)
    proofs: LeaseProofs = field(default_factory=LeaseProofs)  # of the leader
    owners: KeyOwners | None = None
    owner_proofs: dict[PeerId, LeaseProofs] = field(default_factory=dict)
    rng: Random = field(default_factory=lambda: Random(secrets.randbits(64)))
    greeted: set[PeerId] = field(default_factory=set)
    departed: set[PeerId] = field(default_factory=set)
    versions: Iterator[int] = field(default_factory=_versions)

    def access(self, node: PeerId, now_s: float) -> Access:
        """How this client reaches the memory of ``node``; MAPPED only if it lives: its beat is recent, its end open."""
        mapped = self.mapped.get(node)
        if mapped is not None and mapped.index.is_kept(now_s) and mapped.link.remote.alive:
            return Access.MAPPED
        if self.maps_memory and node in self.nodes.local_ids():
            return Access.NEAR
        return Access.MESSAGES if self.streams else Access.ENGINE

    def inline_bytes(self, node: PeerId) -> int:
        """The largest value that ``node`` should send inside its answers."""
        maps = self.maps_memory and node in self.nodes.local_ids()
        return MAX_MESSAGE_BYTES if self.streams and not maps else MAX_INLINE_BYTES

    def is_known(self, peer: PeerId) -> bool:
        """Whether connections to this node or owner are worth keeping."""
        if is_owner(peer):
            return self.owners is not None and peer in self.owners.peers
        return self.nodes.get(peer) is not None

    def proofs_of(self, peer: PeerId) -> LeaseProofs:
        """The proofs of the leader's lease, or of an owner's."""
        return self.owner_proofs.setdefault(peer, LeaseProofs()) if peer else self.proofs

    def take_masters(self, reply: MastersReply) -> bool:
        """Take a master's answer to MASTERS; whether it tells another map than the known one."""
        known, told = self.owners, reply.map
        if told is None or not told.replaces(None if known is None else known.map):
            return False
        self.owners = KeyOwners(told, reply.key_scope) if told.version else None
        named = frozenset[PeerId]() if self.owners is None else self.owners.peers
        gone = frozenset[PeerId]() if known is None else known.peers - named
        for peer in gone:
            self.owner_proofs.pop(peer, None)
        self.departed |= gone
        return True

    def forget(self, node: PeerId) -> None:
        """The node's memory is not mapped any more, or another process took its place."""
        self.mapped.pop(node, None)
        self.write_buffers.forget(node)

    def opened(self, node: PeerId, link: NodeLink, welcome: Welcome) -> None:
        """The node's memory is open; where it is mapped, so is its index, and write buffers may be asked for.

        Where a node comes, another may have gone.
        """
        self.departed.update(each for each, mapped in list(self.mapped.items()) if not mapped.link.remote.alive)
        index = link.index(welcome.index, welcome.key_scope)
        if index is not None:
            self.mapped[node] = MappedNode(link, index, welcome.generation)

    def close(self) -> None:
        """The client is closed: forget all mapped memory."""
        self.mapped.clear()
        self.write_buffers.close()

    def granted_late(self, node: PeerId, reply: messages.GrantingReply) -> None:
        """An answer that came when nobody waited for it any more: its leases, of reservations too, go back."""
        for lease_id in messages.leases_in(reply):
            self.leases.drop(node, lease_id)

    def untold(self, calls: Sequence[tuple[PeerId, messages.AnyCall]]) -> None:
        """Note that these calls were not sent: give back later the leases that they would have given back."""
        for node, call in calls:
            for lease_id in messages.given_back(call):
                self.leases.drop(node, lease_id)

    def given_back(self) -> list[tuple[PeerId, messages.AnyCall]]:
        """Calls that tell the nodes which leases are not needed any more and what was read; counts as told."""
        dropped, reads = self.leases.take_dropped(), self.reads.take()
        return [
            (node, messages.unpin(dropped.get(node, ()), num_bytes, (), keys))
            for node in {**dropped, **reads}
            for keys, num_bytes in (reads.get(node, ((), 0)),)
        ]


def rebuilding_backoff(context: Context) -> Backoff:
    """The pauses of a call that waits until a master that is rebuilding knows its keys."""
    return Backoff(_REBUILDING_PAUSE_S, _REBUILDING_MOST_S, context.rng)


def patience(context: Context, deadline: Deadline) -> Deadline:
    """Until when an operation that begins now waits for a master that is rebuilding."""
    return deadline if context.waits_for_master else deadline.within(0.0)


def tell_reads(context: Context) -> Logic[None]:
    """Let the nodes know what was read before something else is asked of them."""
    if context.reads.noted:
        yield Notify(context.given_back())


def ask_master(call: messages.AnyCall, *, waits: bool = True) -> Logic[messages.AnyReply]:
    """One call to the master; raises its typed error. ``waits``: see CallPeers."""
    (outcome,) = yield CallPeers([(MASTER, call)], waits=waits)
    if isinstance(outcome, TanghuluError):
        raise outcome
    reply: messages.AnyReply = outcome
    return reply


def ask_owners(
    context: Context, deadline: Deadline, call: messages.AnyCall, *, waits: bool = True
) -> Logic[messages.AnyReply]:
    """One call to the masters that own its keys, and their answers as one; raises its typed error.

    ``waits``: see CallPeers. While keys move, or their owner is away, this waits for the one who owns them then.
    """
    if context.owners is None:
        (outcome,) = yield CallPeers([(MASTER, call)], waits=waits)
        if not isinstance(outcome, TanghuluError):
            reply: messages.AnyReply = outcome
            return reply
        if not isinstance(outcome, KeysMoved):
            raise outcome
        yield from learn_owners(context, MASTER)
    return (yield from ask_each_owner(context, deadline, call, waits=waits))


def ask_each_owner(
    context: Context, deadline: Deadline, call: messages.AnyCall, *, waits: bool
) -> Logic[messages.AnyReply]:
    """``ask_owners`` of masters of whom it is known that they are several."""
    split, backoff = SplitCall(call), Backoff(_UNOWNED_PAUSE_S, _UNOWNED_MOST_S, context.rng)
    waits = waits and context.waits_for_master
    while True:
        outcomes = yield CallPeers(split.calls(context.owners), waits=waits)
        failure = split.answered(outcomes, context.owners)
        if failure is None:
            return split.reply()
        knows_more = yield from learn_owners(context, split.informant)
        if knows_more and deadline.remaining_s() > 0:
            continue
        pause_s = backoff.pause_s()
        if not waits or deadline.remaining_s() <= pause_s:
            raise failure
        yield Sleep(pause_s)


def learn_owners(context: Context, informant: PeerId) -> Logic[bool]:
    """Ask ``informant``, or if it does not answer any other master, for the map; whether another one was told."""
    known = context.owners
    others = [] if known is None else sorted({MASTER, *known.peers} - {informant})
    for peer in (informant, *([context.rng.choice(others)] if others else ())):
        request = MastersRequest() if known is None else MastersRequest(known.map.version, known.map.cluster)
        (outcome,) = yield CallPeers([(peer, methods.MASTERS.call(request))], _MAP_S, waits=False)
        if not isinstance(outcome, TanghuluError):
            return context.take_masters(outcome.message)
    return False


def refresh_nodes(context: Context, deadline: Deadline | None = None, *, force: bool = False) -> Logic[None]:
    """Have a list of nodes that is not older than NODES_TTL_S; an old one will do when the master is away.

    ``force``: a node is wanted that the old list does not name, so a master that is away is waited for.
    While the master is new and nobody has registered there, it is asked again until ``deadline``, or for some seconds.
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
    """The nodes in the answer to NODES. A master that is rebuilding does not know all: those known before stay."""
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
    """(holders of each key as the master knows them, nearest first; whether it does not know all yet).

    ``removing``: see LocateRequest.
    """
    holders: list[tuple[tuple[PeerId, ...], int]] = []
    incomplete = False
    for start in range(0, len(keys), KEYS_PER_LOCATE):
        call = messages.locate(keys[start : start + KEYS_PER_LOCATE], removing=removing)
        reply = yield from ask_owners(context, deadline, call, waits=waits)
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
    """Holders of this host first, of these and of the others those that have it in memory.

    Among equals the order differs by key and process, so that they share. ``nodes`` begin with ``num_warm`` warm ones.
    """
    if len(nodes) < 2:
        return nodes
    cold = set(nodes[num_warm:])
    return tuple(sorted(nodes, key=lambda node: (node not in local, node in cold, hash((node, key)))))
