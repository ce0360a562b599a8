"""The ucx transport: one-sided READ and WRITE by UCX, through NIXL; an optional extra (``tanghulu[ucx]``).

A link has an agent of its own, and the owner makes one for it: so a batch that gives up closes only its own two agents.

No late duplicate of a failed WRITE. UCX cannot cancel a submitted operation, so a path that failed, stalled or was
given up has its agent closed here (no READ lands, nothing is sent any more), and the owner is requested to close its
agent, through which alone bytes still on the wire could land, before anything else happens. If it does not answer in
time, the pair's token becomes a fence: every connection to that owner, over ucx, rdma or tcp, sends it first and posts
no slice before the owner has confirmed that the old end is closed. A retry therefore always lands after its
predecessor's end, and so does every later batch. Everybody else is guarded by the lease: the owner closes a session's
agents before it reuses a range whose lease has run out (see ``access``). UCX's shared-memory lanes, which would need no
agent at the owner, are switched off (see ``agent``).

Within the segment a session is trusted, as under shm and rdma: UCX checks the segment's bounds, not leases.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from tanghulu.errors import NodeUnavailable, TanghuluError
from tanghulu.transfer_engine.core.buffers import Buffer
from tanghulu.transfer_engine.core.config import MIB, TransportLimits
from tanghulu.transfer_engine.core.paths import Path, endpoint_paths
from tanghulu.transfer_engine.core.segment import MemorySegment
from tanghulu.transfer_engine.core.transport import Ability, ConnectContext, ServeContext
from tanghulu.transfer_engine.core.wire import MalformedMessage
from tanghulu.transfer_engine.topology.devices import Topology
from tanghulu.transfer_engine.transports.onesided.link import OneSidedPeer
from tanghulu.transfer_engine.transports.onesided.listener import Grant, OneSidedListener
from tanghulu.transfer_engine.transports.ucx import agent
from tanghulu.transfer_engine.transports.ucx.mover import UcxMover

NAME = agent.UCX.protocol
#: Most agents at once; each has a thread, some 15 descriptors and 5 MB.
MAX_AGENTS = 64
LIMITS = TransportLimits(slice_bytes=4 * MIB, window_bytes=16 * MIB, window_slices=64)


def connect(context: ConnectContext) -> OneSidedPeer:
    """Return a remote segment behind the owner's agents; raises NodeUnavailable without NIXL."""
    reason = agent.probe()
    if reason:
        raise NodeUnavailable(reason)
    return OneSidedPeer(context, UcxMovers, lambda rank: endpoint_paths(context.endpoints(NAME), rank))


def serve(context: ServeContext) -> OneSidedListener:
    """Return the listener: an agent with the segment for each client."""
    return OneSidedListener(UcxEnds(context.segment), context)


def probe(topology: Topology) -> Ability:
    """Return whether NIXL is installed."""
    reason = agent.probe()
    return Ability(not reason, reason or "UCX through NIXL, over whatever network UCX finds")


class UcxMovers:
    """One link's agents, which share nothing."""

    dialect = agent.UCX

    def make(self, path: Path, token: int, wake: Callable[[], None]) -> UcxMover:
        """Return an agent; raises NodeUnavailable if there is no NIXL, TransferFailed."""
        return UcxMover(token)

    def close(self) -> None:
        """Do nothing: links share nothing."""


class UcxEnds:
    """Makes the owner's ends: one agent per client with the segment registered. UCX finds the devices by itself.

    UCX moves the bytes in the agents' threads; ``onesided.listener`` decides who gets an agent, and when it must go.
    Closing one takes some milliseconds on the event loop; making one takes longer and is done in a thread.
    """

    dialect = agent.UCX
    devices: Sequence[str] = ("",)

    def __init__(self, segment: MemorySegment) -> None:
        self.max_ends = MAX_AGENTS
        self._segment = segment
        self._memory: Buffer | None = None

    async def start(self) -> None:
        """Check for NIXL; raises NodeUnavailable without it."""
        reason = await asyncio.to_thread(agent.probe)
        if reason:
            raise NodeUnavailable(reason)
        self._memory = Buffer(self._segment.view)

    def admit(self, asked: bytes) -> None:
        """Admit everybody; raises MalformedMessage."""
        if asked:
            raise MalformedMessage(f"a ucx CONNECT with {len(asked)} bytes")

    async def make(self, token: int, asked: bytes, take: Callable[[Grant], None]) -> None:
        """Hand ``take`` an agent. Raises NodeUnavailable, TransferFailed."""
        take(await asyncio.to_thread(self._make, token))

    def close(self) -> None:
        """Release the memory."""
        self._memory = None

    def _make(self, token: int) -> Grant:
        memory = self._memory
        if memory is None:
            raise NodeUnavailable("the segment's server is closing")
        own = agent.Agent(f"owner-{token:x}", serves=True)
        try:
            return Grant(own, agent.pack_granted(memory.address, own.offer(memory.address, memory.size_bytes)))
        except TanghuluError:
            own.close()
            raise
