"""The life of one access right to a range of a segment: its states, events and the table between them.

    (state, event)            table                      worked example
    ACTIVE ---- GIVEN_BACK --> DRAINING -- DRAINED --> FREE   a reader unpins: nothing is open, free at once
    ACTIVE ---- LOST_COPIED -> DRAINING -- DRAINED --> FREE   a TCP reader's time is up while a slice is being sent:
                                                              free when that slice has left or its connection is cut
    ACTIVE ---- LOST_MAPPED -> QUARANTINED -- GIVEN_BACK ...  a reader that maps the memory vanished from the wire:
                                                              kept until it unpins or its process has exited

Knows nothing of clocks, sessions' caps or sockets: those decide in ``access`` which event happens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from tanghulu.transfer_engine.core.slices import Opcode
from tanghulu.types import LeaseId


class LeaseState(Enum):
    """Where a lease stands."""

    #: The peer may begin transfers (TCP) or touch the mapped range (shm).
    ACTIVE = "active"
    #: A peer that maps the memory lost its right but cannot be stopped: nobody may reuse the range.
    QUARANTINED = "quarantined"
    #: No new transfer may begin; the begun ones have not ended yet.
    DRAINING = "draining"
    #: The peer cannot touch the range under this lease any more.
    FREE = "free"


class LeaseEvent(Enum):
    """What happens to a lease."""

    #: The holder released it, or its process has exited.
    GIVEN_BACK = "given back"
    #: Time is up or the session is closed, and the peer reaches the range through this process only.
    LOST_COPIED = "lost, peer gets copies"
    #: Time is up or the session is closed, and the peer maps the memory itself.
    LOST_MAPPED = "lost, peer maps the memory"
    #: No begun transfer is open any more.
    DRAINED = "drained"


TRANSITIONS: dict[tuple[LeaseState, LeaseEvent], LeaseState] = {
    (LeaseState.ACTIVE, LeaseEvent.GIVEN_BACK): LeaseState.DRAINING,
    (LeaseState.ACTIVE, LeaseEvent.LOST_COPIED): LeaseState.DRAINING,
    (LeaseState.ACTIVE, LeaseEvent.LOST_MAPPED): LeaseState.QUARANTINED,
    (LeaseState.QUARANTINED, LeaseEvent.GIVEN_BACK): LeaseState.DRAINING,
    (LeaseState.QUARANTINED, LeaseEvent.LOST_MAPPED): LeaseState.QUARANTINED,
    (LeaseState.DRAINING, LeaseEvent.GIVEN_BACK): LeaseState.DRAINING,
    (LeaseState.DRAINING, LeaseEvent.LOST_COPIED): LeaseState.DRAINING,
    (LeaseState.DRAINING, LeaseEvent.LOST_MAPPED): LeaseState.DRAINING,
    (LeaseState.DRAINING, LeaseEvent.DRAINED): LeaseState.FREE,
}


@dataclass(frozen=True, slots=True)
class Freed:
    """``[offset, offset + length)`` cannot be touched any more under ``lease_id``; other leases may still cover it."""

    lease_id: LeaseId
    offset: int
    length: int


@dataclass(slots=True)
class Lease:
    """One access right. ``mapped`` says that the peer maps the memory itself (shm)."""

    lease_id: LeaseId
    session_id: int
    offset: int
    length: int
    mode: Opcode
    mapped: bool
    expires_at_s: float
    #: No renewal goes beyond it.
    last_end_s: float
    state: LeaseState = field(default=LeaseState.ACTIVE)
    num_open: int = 0

    def step(self, event: LeaseEvent) -> LeaseState:
        """Apply ``event``; asserts that the table knows the pair."""
        following = TRANSITIONS.get((self.state, event))
        assert following is not None, f"lease {self.lease_id} cannot take {event.value} in {self.state.value}"
        self.state = following
        return following

    def freed(self) -> Freed:
        """What its owner is told when it is over."""
        return Freed(self.lease_id, self.offset, self.length)
