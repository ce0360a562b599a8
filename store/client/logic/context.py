"""The state shared by all operations of one client and kept between them."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

from tanghulu.runtime.clock import Clock
from tanghulu.store.client.logic import messages
from tanghulu.store.client.logic.effects import (
    Logic,
    NodeLink,
    Notify,
    PeerId,
    is_owner,
)
from tanghulu.store.client.logic.key_owners import KnownMasters
from tanghulu.store.client.logic.leases import Leases, Reads
from tanghulu.store.client.logic.placement import LocationCache, NodeTable
from tanghulu.store.client.logic.plan import Access
from tanghulu.store.client.logic.receive_memory import ReceiveMemory
from tanghulu.store.client.logic.write_buffers import MappedNode, OpenWriteBuffers
from tanghulu.store.protocol import methods
from tanghulu.store.protocol.messages import MastersReply, UnpinRequest, Welcome
from tanghulu.store.protocol.types import MAX_INLINE_BYTES, MAX_MESSAGE_BYTES


def _versions() -> Iterator[int]:
    # No two puts share one. Random beginnings keep the versions of different clients apart; 2**20 puts per client
    # fit before they could meet.
    return itertools.count(secrets.randbits(43) << 20 | 1)


def no_flush() -> None:
    """Return no leases: there is no driver, or it is closed."""


@dataclass
class Context:
    """One client's state between operations. ``mapped``: the nodes of this host whose memory is mapped.

    ``greeted`` are the nodes to which the driver keeps connections; it has to close those to ``departed`` ones, since
    an open mapping keeps all memory of a process that is gone.

    ``flush``, set by the driver, returns unneeded leases soon, without waiting for a next call.

    ``wait_s``: seconds that one call may wait at the master. ``waits_for_master``: whether operations wait until a
    rebuilding master knows their keys. ``streams``: values of up to 1 MiB travel inside messages where memory is not
    mapped, unless they should move by verbs or UCX.
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
    masters: KnownMasters = field(default_factory=KnownMasters)
    rng: Random = field(default_factory=lambda: Random(secrets.randbits(64)))
    greeted: set[PeerId] = field(default_factory=set)
    departed: set[PeerId] = field(default_factory=set)
    versions: Iterator[int] = field(default_factory=_versions)
    flush: Callable[[], None] = no_flush

    def access(self, node: PeerId, now_s: float) -> Access:
        """Return this client's access to the memory of ``node``; MAPPED only if alive: beat recent, other end open."""
        mapped = self.mapped.get(node)
        if mapped is not None and mapped.index.is_kept(now_s) and mapped.link.remote.alive:
            return Access.MAPPED
        if self.maps_memory and node in self.nodes.local_ids():
            return Access.NEAR
        return Access.MESSAGES if self.streams else Access.ENGINE

    def inline_bytes(self, node: PeerId) -> int:
        """Return the size of the largest value that ``node`` should send inside its answers."""
        maps = self.maps_memory and node in self.nodes.local_ids()
        return MAX_MESSAGE_BYTES if self.streams and not maps else MAX_INLINE_BYTES

    def is_known(self, peer: PeerId) -> bool:
        """Return whether connections to this node or owner are worth keeping."""
        if is_owner(peer):
            return self.masters.owns_keys(peer)
        return self.nodes.get(peer) is not None

    def take_masters(self, reply: MastersReply) -> bool:
        """Take a master's answer to MASTERS; return whether its map differs from the known one."""
        gone = self.masters.take(reply)
        self.departed |= gone or frozenset()
        return gone is not None

    def forget(self, node: PeerId) -> None:
        """Forget the node: its memory is no longer mapped, or another process took its place."""
        self.mapped.pop(node, None)
        self.write_buffers.forget(node)

    def opened(self, node: PeerId, link: NodeLink, welcome: Welcome) -> None:
        """Record that the node's memory is open; if mapped, so is its index, and write buffers may be requested.

        The arrival of a node may mean that another has left.
        """
        self.departed.update(each for each, mapped in list(self.mapped.items()) if not mapped.link.remote.alive)
        index = link.index(welcome.index, welcome.key_scope)
        if index is not None:
            self.mapped[node] = MappedNode(link, index, welcome.generation)

    def close(self) -> None:
        """Forget all mapped memory and the driver, as the client is closed."""
        self.flush = no_flush
        self.mapped.clear()
        self.write_buffers.close()

    def return_granted(self, node: PeerId, reply: messages.GrantingReply) -> None:
        """Return the leases, of reservations too, granted by an answer that came too late for its caller."""
        for lease_id in messages.leases_in(reply):
            self.leases.drop(node, lease_id)

    def requeue(self, calls: Sequence[tuple[PeerId, messages.AnyCall]]) -> None:
        """Return the leases of undelivered notices later."""
        for node, call in calls:
            assert isinstance(call.request, UnpinRequest), "a notice returns leases"
            for lease_id in call.request.lease_ids:
                self.leases.drop(node, lease_id)

    def take_notices(self) -> list[tuple[PeerId, messages.AnyCall]]:
        """Take the calls that return leases to the nodes, and report the reads there."""
        dropped, reads = self.leases.take_dropped(), self.reads.take()
        return [
            (node, methods.UNPIN.call(UnpinRequest(dropped.get(node, ()), num_bytes, (), keys)))
            for node in {**dropped, **reads}
            for keys, num_bytes in (reads.get(node, ((), 0)),)
        ]


def report_reads(context: Context) -> Logic[None]:
    """Report reads to the nodes, before the next call to them."""
    if context.reads.noted:
        yield Notify(context.take_notices())
