"""Life of one access right to a range of a segment: its states, events and the table between them.

    (state, event)            table                      worked example
    ACTIVE ---- GIVEN_BACK --> DRAINING -- DRAINED --> FREE   a reader unpins: nothing is open, free at once
    ACTIVE ---- LOST_COPIED -> DRAINING -- DRAINED --> FREE   a TCP reader's time is up while a slice is being sent:
                                                              free when that slice has left or its connection is cut
    ACTIVE ---- LOST_MAPPED -> QUARANTINED -- GIVEN_BACK ...  a reader that maps the memory vanished from the wire:
                                                              kept until it unpins or its process has exited

Independent of clocks, sessions' caps and sockets: ``access`` uses those to decide which event happens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from tanghulu.transfer_engine.core.slices import Opcode
from tanghulu.types import LeaseId


class LeaseState(Enum):
    """State of a lease."""

    #: The peer may begin transfers (TCP) or touch the mapped range (shm).
    ACTIVE = "active"
    #: A peer that maps the memory has lost its right but cannot be stopped: the range must not be reused.
    QUARANTINED = "quarantined"
    #: No new transfer may begin; those begun have not ended yet.
    DRAINING = "draining"
    #: The peer cannot touch the range under this lease any more.
    FREE = "free"


class LeaseEvent(Enum):
    """Event in the life of a lease."""

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
    """``[offset, offset + length)`` is out of reach under ``lease_id``; other leases may still cover it."""

    lease_id: LeaseId
    offset: int
    length: int


@dataclass(slots=True)
class Lease:
    """One access right. ``mapped``: the peer maps the memory itself (shm)."""

    lease_id: LeaseId
    session_id: int
    offset: int
    length: int
    mode: Opcode
    mapped: bool
    expires_at_s: float
    #: Limit of every renewal.
    last_end_s: float
    state: LeaseState = field(default=LeaseState.ACTIVE)
    num_open: int = 0

    def step(self, event: LeaseEvent) -> LeaseState:
        """Apply ``event``; asserts that the pair is in the table."""
        following = TRANSITIONS.get((self.state, event))
        assert following is not None, f"lease {self.lease_id} cannot take {event.value} in {self.state.value}"
        self.state = following
        return following

    def freed(self) -> Freed:
        """Return the report to its owner when it has ended."""
        return Freed(self.lease_id, self.offset, self.length)
