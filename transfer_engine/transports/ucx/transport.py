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
would need no agent at the owner, are switched off (see ``ucx_agent``).

Within the segment a session is trusted, as under shm and rdma: UCX checks the segment's bounds, not leases.
"""

from __future__ import annotations

from collections.abc import Callable

from tanghulu.transfer_engine.core.fences import Fences
from tanghulu.transfer_engine.core.paths import Path
from tanghulu.transfer_engine.core.segment import SegmentDescriptor
from tanghulu.transfer_engine.transports.onesided.link import OneSidedPeer
from tanghulu.transfer_engine.transports.ucx.mover import UcxMover
from tanghulu.transfer_engine.transports.ucx.wire import UCX


def ucx_peer(descriptor: SegmentDescriptor, session_id: int, fences: Fences) -> OneSidedPeer:
    """A remote segment behind a ucx door."""
    return OneSidedPeer(descriptor, session_id, fences, UcxMovers)


class UcxMovers:
    """One link's agents, which share nothing."""

    dialect = UCX

    def make(self, path: Path, token: int, wake: Callable[[], None]) -> UcxMover:
        """An agent; raises NodeUnavailable if there is no NIXL, TransferFailed."""
        return UcxMover(token)

    def close(self) -> None:
        """Nothing is shared."""
