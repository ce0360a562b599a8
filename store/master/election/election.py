"""Which of several masters leads: the decisions, without I/O (``leadership`` is the driver).

The leader is the master that holds one key in etcd, written only where there was none, under a lease that it renews.
Its *term* is the revision of that write: a later leader has a higher one. The leader counts the lease by its own clock
from the moment *before* it asked for the renewal, and ``MARGIN_S`` less, so it has stopped leading for certain when
etcd lets another master write the key, however long it stood still in between.

    FOLLOWING --KEY_GONE--> VACANT --RETRY_DUE--> APPLYING --LEASE_GRANTED--> CAMPAIGNING --WON--> LEADING
        ^                     ^                      |                            |                   |
        +------KEY_SEEN-------+---------FAILED-------+-------FAILED, LOST---------+                   |
        ^                                                                                             |
        +-- TIME_UP, LEASE_GONE, OUTRANKED, KEY_GONE, KEY_SEEN (another's): it steps down ------------+

Example with ttl 3 s: the lease is asked for at 10.0 and granted at 10.1; the key is written at 10.2, revision 41:
this master leads term 41 until 12.7. Renewals are asked for at 10.5, 11.0, ...: that of 10.5, answered, makes it 13.2.

Renewals are numbered, and the leader tells its callers how many it has asked for and up to which one etcd has confirmed
them, so that a clock of this process that stood still does not deceive theirs (``protocol.terms.LeaseProofs``).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from tanghulu.store.protocol.terms import MARGIN_S

#: Renewals that are asked for in the time of one lease.
RENEWALS = 6
#: After a campaign that failed, until the next.
RETRY_S = 0.1


class ElectionState(Enum):
    """The states of this master in the election."""

    FOLLOWING = "another leads, or nothing is known yet"
    VACANT = "nobody leads; a campaign begins when it is due"
    APPLYING = "a lease was asked for"
    CAMPAIGNING = "the key is being written"
    LEADING = "this master leads until its lease is over"
    RESIGNED = "the process ends"


class ElectionEvent(Enum):
    """The events that change this master's state."""

    KEY_SEEN = "somebody else holds the key"
    KEY_GONE = "nobody holds the key"
    RETRY_DUE = "it is time to campaign"
    LEASE_GRANTED = "etcd gave a lease"
    WON = "the key is ours"
    LOST = "somebody was faster"
    FAILED = "etcd did not answer"
    TIME_UP = "the lease may be over"
    LEASE_GONE = "etcd says that the lease is over"
    OUTRANKED = "somebody has heard of a later term"
    RESIGN = "the process ends"


_S, _E = ElectionState, ElectionEvent
TRANSITIONS: dict[tuple[ElectionState, ElectionEvent], ElectionState] = {
    (_S.FOLLOWING, _E.KEY_SEEN): _S.FOLLOWING,
    (_S.FOLLOWING, _E.KEY_GONE): _S.VACANT,
    (_S.VACANT, _E.KEY_SEEN): _S.FOLLOWING,
    (_S.VACANT, _E.KEY_GONE): _S.VACANT,
    (_S.VACANT, _E.RETRY_DUE): _S.APPLYING,
    (_S.APPLYING, _E.KEY_SEEN): _S.APPLYING,
    (_S.APPLYING, _E.KEY_GONE): _S.APPLYING,
    (_S.APPLYING, _E.LEASE_GRANTED): _S.CAMPAIGNING,
    (_S.APPLYING, _E.FAILED): _S.VACANT,
    (_S.CAMPAIGNING, _E.KEY_SEEN): _S.CAMPAIGNING,
    (_S.CAMPAIGNING, _E.KEY_GONE): _S.CAMPAIGNING,
    (_S.CAMPAIGNING, _E.WON): _S.LEADING,
    (_S.CAMPAIGNING, _E.LOST): _S.FOLLOWING,
    (_S.CAMPAIGNING, _E.FAILED): _S.VACANT,
    (_S.LEADING, _E.KEY_SEEN): _S.FOLLOWING,
    (_S.LEADING, _E.KEY_GONE): _S.VACANT,
    (_S.LEADING, _E.TIME_UP): _S.VACANT,
    (_S.LEADING, _E.LEASE_GONE): _S.VACANT,
    (_S.LEADING, _E.OUTRANKED): _S.FOLLOWING,
    **{(state, _E.RESIGN): _S.RESIGNED for state in _S},
}


@dataclass(frozen=True, slots=True)
class KeyHolder:
    """The master that holds the key: its address, and the revision at which the key was written."""

    address: str
    term: int


@dataclass(frozen=True, slots=True)
class Apply:
    """Ask for a lease; answer with ``lease_granted`` or ``failed``."""


@dataclass(frozen=True, slots=True)
class Campaign:
    """Write the key under the lease if there is none; answer with ``campaigned`` or ``failed``."""

    lease: int


@dataclass(frozen=True, slots=True)
class Renew:
    """Renew the lease; answer with ``renewed``. One that fails is answered by nothing: the next follows soon."""

    lease: int
    number: int = 0


@dataclass(frozen=True, slots=True)
class Revoke:
    """Give the lease back, and with it the key if it was written."""

    lease: int


@dataclass(frozen=True, slots=True)
class Lead:
    """Begin to lead with an empty directory."""

    term: int


@dataclass(frozen=True, slots=True)
class StepDown:
    """Answer nobody any more, and forget."""


Instruction: TypeAlias = Apply | Campaign | Renew | Revoke | Lead | StepDown


class Election:
    """One master's part in the election. ``now_s`` is of a monotonic clock that never stops with the process."""

    def __init__(self, ttl_s: float) -> None:
        assert ttl_s > 2 * MARGIN_S
        self.state = ElectionState.FOLLOWING
        self.leader = ""  # as far as this master knows; itself while it leads
        self.term = 0  # that it leads, or led last
        self._ttl_s = ttl_s
        self.num_asked = 0  # renewals, the grant of a lease among them
        self.num_confirmed = 0  # the last of them that etcd has confirmed
        self._lease = 0
        self._until_s = 0.0
        self._renew_s = 0.0
        self._retry_s = 0.0
        self._holder: KeyHolder | None = None  # as last seen, at
        self._revision = 0

    def leads(self, now_s: float) -> bool:
        """Whether this master may answer as the leader at ``now_s``."""
        return self.state is ElectionState.LEADING and now_s < self._until_s

    # --- events

    def seen(self, holder: KeyHolder | None, revision: int) -> list[Instruction]:
        """Take the key as etcd has it at ``revision``; an older revision than one seen before is ignored."""
        if revision < self._revision:
            return []
        self._holder, self._revision = holder, revision
        was_leading = self.state is ElectionState.LEADING
        if holder is not None and was_leading and holder.term == self.term:
            return []
        self._settle()
        return [StepDown(), *self._revoke()] if was_leading else []

    def lease_granted(self, lease: int, asked_s: float) -> list[Instruction]:
        """The answer to Apply, which was asked at ``asked_s``."""
        if self.state is not ElectionState.APPLYING:
            return [Revoke(lease)]
        self._move(ElectionEvent.LEASE_GRANTED)
        self._lease = lease
        self.num_asked += 1
        self._hold(asked_s, self.num_asked)
        return [Campaign(lease)]

    def campaigned(self, holder: KeyHolder, revision: int, *, won: bool, now_s: float) -> list[Instruction]:
        """The answer to Campaign: who holds the key at ``revision``."""
        if self.state is not ElectionState.CAMPAIGNING:
            return []
        if revision >= self._revision:
            self._holder, self._revision = holder, revision
        if not won:
            self._move(ElectionEvent.LOST)
            self._settle()
            return self._revoke()
        self._move(ElectionEvent.WON)
        self.leader, self.term = holder.address, holder.term
        if self._holder != holder:  # gone again already
            self._settle()
            return self._revoke()
        if now_s >= self._until_s:
            self._move(ElectionEvent.TIME_UP)
            self._settle()
            return self._revoke()
        return [Lead(holder.term)]

    def failed(self, now_s: float) -> list[Instruction]:
        """Take note that Apply or Campaign got no answer; the key may be ours all the same, so give the lease back."""
        if self.state not in (ElectionState.APPLYING, ElectionState.CAMPAIGNING):
            return []
        self._move(ElectionEvent.FAILED)
        self._retry_s = now_s + RETRY_S
        self._settle()
        return self._revoke()

    def renew(self, now_s: float) -> list[Instruction]:
        """Ask for a renewal now; nothing unless this master leads."""
        if self.state is not ElectionState.LEADING:
            return []
        self._renew_s = now_s + self._ttl_s / RENEWALS
        self.num_asked += 1
        return [Renew(self._lease, self.num_asked)]

    def renewed(self, renewal: Renew, asked_s: float, *, known: bool) -> list[Instruction]:
        """The answer to Renew, which was asked at ``asked_s``; not ``known``: the lease is over."""
        if self.state is not ElectionState.LEADING or renewal.lease != self._lease:
            return []
        if known:
            self._hold(asked_s, renewal.number)
            return []
        return self._step_down(ElectionEvent.LEASE_GONE, asked_s)

    def outranked(self, term: int, now_s: float) -> list[Instruction]:
        """Step down if ``term``, of a leader that a node has heard of, is later than this master's."""
        if self.state is not ElectionState.LEADING or term <= self.term:
            return []
        return self._step_down(ElectionEvent.OUTRANKED, now_s)

    def tick(self, now_s: float) -> list[Instruction]:
        """Let leases end, campaigns and renewals fall due; called often."""
        if self.state is ElectionState.LEADING:
            if now_s >= self._until_s:
                return self._step_down(ElectionEvent.TIME_UP, now_s)
            if now_s >= self._renew_s:
                return self.renew(now_s)
        elif self.state is ElectionState.VACANT and now_s >= self._retry_s:
            self._move(ElectionEvent.RETRY_DUE)
            return [Apply()]
        return []

    def resign(self) -> list[Instruction]:
        """End this master's part: let the others elect at once."""
        was_leading = self.state is ElectionState.LEADING
        self._move(ElectionEvent.RESIGN)
        return [*([StepDown()] if was_leading else []), *self._revoke()]

    # --- inside

    def _move(self, event: ElectionEvent) -> None:
        if self.state is not ElectionState.RESIGNED:
            self.state = TRANSITIONS[self.state, event]

    def _settle(self) -> None:
        """Follow, or be vacant, as what was last seen of the key says."""
        holder = self._holder
        self._move(ElectionEvent.KEY_GONE if holder is None else ElectionEvent.KEY_SEEN)
        self.leader = "" if holder is None or holder.term == self.term else holder.address

    def _hold(self, asked_s: float, number: int) -> None:
        self.num_confirmed = max(self.num_confirmed, number)
        self._until_s = max(self._until_s, asked_s + self._ttl_s - MARGIN_S)
        self._renew_s = asked_s + self._ttl_s / RENEWALS

    def _step_down(self, event: ElectionEvent, now_s: float) -> list[Instruction]:
        self._move(event)
        self._retry_s = now_s + RETRY_S
        self._settle()
        return [StepDown(), *self._revoke()]

    def _revoke(self) -> list[Instruction]:
        lease, self._lease, self._until_s = self._lease, 0, 0.0
        return [Revoke(lease)] if lease else []

    def check(self) -> None:
        """Assert that a lease is held exactly while campaigning or leading."""
        assert bool(self._lease) == (self.state in (ElectionState.CAMPAIGNING, ElectionState.LEADING))
        assert self.state is not ElectionState.LEADING or self.term > 0
        assert 0 <= self.num_confirmed <= self.num_asked

    def __repr__(self) -> str:
        return f"Election({self.state.name}, term {self.term}, leader {self.leader or 'unknown'})"
