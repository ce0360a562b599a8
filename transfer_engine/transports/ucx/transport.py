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

Making and closing an agent takes some milliseconds; nothing else of a ``UcxMover`` waits.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from tanghulu.errors import NodeUnavailable, TanghuluError
from tanghulu.transfer_engine.core.buffers import Buffer
from tanghulu.transfer_engine.core.config import MIB, TransportLimits
from tanghulu.transfer_engine.core.paths import Path, endpoint_paths
from tanghulu.transfer_engine.core.segment import MemorySegment
from tanghulu.transfer_engine.core.slices import Slice
from tanghulu.transfer_engine.core.transport import Ability, Completion, ConnectContext, ServeContext
from tanghulu.transfer_engine.core.wire import MalformedMessage
from tanghulu.transfer_engine.topology.devices import Topology
from tanghulu.transfer_engine.transports.onesided.connection import Mover, Posted, StagedSlots
from tanghulu.transfer_engine.transports.onesided.link import OneSidedPeer
from tanghulu.transfer_engine.transports.onesided.listener import Grant, OneSidedListener
from tanghulu.transfer_engine.transports.ucx import agent
from tanghulu.transfer_engine.transports.ucx.agent import Agent, AgentRegistration, parse_granted

NUM_SLOTS = 16


class UcxMover(Mover):
    """An agent of one connection alone; ``token`` is its name, and the key of what it registers."""

    def __init__(self, token: int) -> None:
        """Make the agent; raises NodeUnavailable if there is no NIXL, TransferFailed."""
        super().__init__(StagedSlots(NUM_SLOTS))
        self._token = token
        self._peer = ""
        self._segment_address = 0
        self._agent = Agent(f"client-{token:x}", serves=False)
        self._staged = self._agent.register(self._slots.memory.address, self._slots.memory.size_bytes)

    # --- Mover

    def connect(self, granted: bytes) -> None:
        """Load the owner's metadata."""
        self._segment_address, metadata = parse_granted(granted)
        self._peer = self._agent.connect(metadata)
        self.ready = True

    def post(self, piece: Slice) -> None:
        """Hand the slice to UCX."""
        slot = self._slots.take(piece)
        if slot is None:
            self._register(piece.buffer)
            local = piece.buffer.address + piece.local_offset
        else:
            local = self._slots.address(slot)
        remote = self._segment_address + piece.remote_offset
        transfer = self._agent.post(piece.opcode, self._peer, local, remote, piece.length)
        self._posted.append(Posted(piece, slot, transfer))

    def collect(self, landed: list[Slice], ended: list[Completion]) -> None:
        """Advance the transfers by polling each."""
        still: deque[Posted] = deque()
        for each in self._posted:
            if not each.transfer.done():
                still.append(each)
                continue
            each.transfer.release()
            if each.slot is not None:
                self._slots.put(each.slot, each.piece)
            landed.append(each.piece)
        self._posted = still

    def close(self) -> None:
        """Close the agent; slots in use go with it."""
        self._posted.clear()
        self._agent.close()
        self._staged.close()

    # --- inside

    def _register(self, buffer: Buffer) -> None:
        """Register once for each buffer and agent; closed agents' registrations are forgotten with the next."""
        if self._token in buffer.regions:
            return
        for key, region in list(buffer.regions.items()):
            if isinstance(region, AgentRegistration) and (region.agent is None or region.agent.closed):
                buffer.regions.pop(key, None)
        buffer.regions[self._token] = self._agent.register(buffer.address, buffer.size_bytes)


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

    def admit(self, connect_payload: bytes) -> None:
        """Admit everybody; raises MalformedMessage."""
        if connect_payload:
            raise MalformedMessage(f"a ucx CONNECT with {len(connect_payload)} bytes")

    async def make(self, token: int, connect_payload: bytes, take: Callable[[Grant], None]) -> None:
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
