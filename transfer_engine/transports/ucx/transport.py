"""The ucx transport: one-sided READ and WRITE by UCX, through NIXL; an optional extra (``tanghulu[ucx]``).

A link has an agent of its own, and the owner makes one for it: so a batch that gives up closes its own two agents and
nobody else's.

No late duplicate of a failed WRITE. UCX cannot take back what it was told to send, so a path that failed, stalled or
was given up has its agent closed here (no READ lands, nothing is sent any more), and the owner is asked to close its
agent, through which alone what is still on the wire could land, before anything else happens. Where it does not answer
in time the pair's token becomes a fence: every connection to that owner, over ucx, rdma or tcp, tells it first and
posts no slice before the owner has answered that the old end is closed. A retry therefore always lands behind its
predecessor's end, and so does every later batch. For everybody else the lease is the guard: the owner closes a
session's agents before it reuses a range whose lease has run out (see ``access``). UCX's shared-memory lanes, which
would need no agent at the owner, are switched off (see ``agent``).

Within the segment a session is trusted, as under shm and rdma: UCX checks the segment's bounds, not leases.
"""

from __future__ import annotations

from collections.abc import Callable

from tanghulu.errors import NodeUnavailable
from tanghulu.transfer_engine.core.config import MIB, TransportLimits
from tanghulu.transfer_engine.core.paths import Path, endpoint_paths
from tanghulu.transfer_engine.core.transport import Ability, ConnectContext, ServeContext
from tanghulu.transfer_engine.topology.devices import Topology
from tanghulu.transfer_engine.transports.onesided.link import OneSidedPeer
from tanghulu.transfer_engine.transports.onesided.listener import OneSidedListener
from tanghulu.transfer_engine.transports.ucx import agent
from tanghulu.transfer_engine.transports.ucx.listener import UcxEnds
from tanghulu.transfer_engine.transports.ucx.mover import UcxMover

NAME = agent.UCX.protocol
LIMITS = TransportLimits(slice_bytes=4 * MIB, window_bytes=16 * MIB, window_slices=64)


def connect(context: ConnectContext) -> OneSidedPeer:
    """A remote segment behind the owner's agents; raises NodeUnavailable without NIXL."""
    reason = agent.probe()
    if reason:
        raise NodeUnavailable(reason)
    return OneSidedPeer(context, UcxMovers, lambda rank: endpoint_paths(context.endpoints(NAME), rank))


def serve(context: ServeContext) -> OneSidedListener:
    """An agent with the segment for each client."""
    return OneSidedListener(UcxEnds(context.segment), context)


def probe(topology: Topology) -> Ability:
    """Whether NIXL is installed."""
    reason = agent.probe()
    return Ability(not reason, reason or "UCX through NIXL, over whatever network UCX finds")


class UcxMovers:
    """One link's agents, which share nothing."""

    dialect = agent.UCX

    def make(self, path: Path, token: int, wake: Callable[[], None]) -> UcxMover:
        """An agent; raises NodeUnavailable if there is no NIXL, TransferFailed."""
        return UcxMover(token)

    def close(self) -> None:
        """Do nothing: links share nothing."""
