"""Who leads among several masters: the decisions, without I/O (see leadership for the shell).

The leader is whoever holds one key in etcd, written only where there was none, under a lease that it renews. Its
*term* is the revision of that write: a later leader has a higher one. The lease is counted by the leader's own clock
from the moment *before* it asked for the renewal, and ``MARGIN_S`` less, so it has stopped leading for certain when
etcd lets somebody else write the key, however long it stood still in between.

    FOLLOWING --KEY_GONE--> VACANT --RETRY_DUE--> APPLYING --LEASE_GRANTED--> CAMPAIGNING --WON--> LEADING
        ^                     ^                      |                            |                   |
        +------KEY_SEEN-------+---------FAILED-------+-------FAILED, LOST---------+                   |
        ^                                                                                             |
        +-- TIME_UP, LEASE_GONE, OUTRANKED, KEY_GONE, KEY_SEEN (another's): it steps down ------------+

Example with ttl 3 s: the lease is asked for at 10.0 and granted at 10.1; the key is written at 10.2, revision 41:
this master leads term 41 until 12.7. Renewals are asked for at 10.5, 11.0, ...: that of 10.5, answered, makes it 13.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

#: How much sooner than etcd the leader takes its lease for over: clocks drift, and an answer may be under way.
MARGIN_S = 0.3
#: Renewals are asked for so often in a lease.
RENEWALS = 6
#: After a campaign that failed, until the next.
RETRY_S = 0.1


class Standing(Enum):
    """Where this master stands."""

    FOLLOWING = "another leads, or nothing is known yet"
    VACANT = "nobody leads; a campaign begins when it is due"
    APPLYING = "a lease was asked for"
    CAMPAIGNING = "the key is being written"
    LEADING = "this master leads until its lease is over"
    RESIGNED = "the process ends"


class Happening(Enum):
    """What moves it."""

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


_S, _H = Standing, Happening
TRANSITIONS: dict[tuple[Standing, Happening], Standing] = {
    (_S.FOLLOWING, _H.KEY_SEEN): _S.FOLLOWING,
    (_S.FOLLOWING, _H.KEY_GONE): _S.VACANT,
    (_S.VACANT, _H.KEY_SEEN): _S.FOLLOWING,
    (_S.VACANT, _H.KEY_GONE): _S.VACANT,
    (_S.VACANT, _H.RETRY_DUE): _S.APPLYING,
    (_S.APPLYING, _H.KEY_SEEN): _S.APPLYING,
    (_S.APPLYING, _H.KEY_GONE): _S.APPLYING,
    (_S.APPLYING, _H.LEASE_GRANTED): _S.CAMPAIGNING,
    (_S.APPLYING, _H.FAILED): _S.VACANT,
    (_S.CAMPAIGNING, _H.KEY_SEEN): _S.CAMPAIGNING,
    (_S.CAMPAIGNING, _H.KEY_GONE): _S.CAMPAIGNING,
    (_S.CAMPAIGNING, _H.WON): _S.LEADING,
    (_S.CAMPAIGNING, _H.LOST): _S.FOLLOWING,
    (_S.CAMPAIGNING, _H.FAILED): _S.VACANT,
    (_S.LEADING, _H.KEY_SEEN): _S.FOLLOWING,
    (_S.LEADING, _H.KEY_GONE): _S.VACANT,
    (_S.LEADING, _H.TIME_UP): _S.VACANT,
    (_S.LEADING, _H.LEASE_GONE): _S.VACANT,
    (_S.LEADING, _H.OUTRANKED): _S.FOLLOWING,
    **{(standing, _H.RESIGN): _S.RESIGNED for standing in _S},
}


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds the key: its address, and the revision at which it was written."""

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
    """One master's part. ``now_s``: one monotonic clock that also runs while the process stands still."""

    def __init__(self, ttl_s: float) -> None:
        assert ttl_s > 2 * MARGIN_S
        self.standing = Standing.FOLLOWING
        self.leader = ""  # as far as this master knows; itself while it leads
        self.term = 0  # that it leads, or led last
        self._ttl_s = ttl_s
        self._lease = 0
        self._until_s = 0.0
        self._renew_s = 0.0
        self._retry_s = 0.0
        self._holder: Holder | None = None  # as last seen, at
        self._revision = 0

    def leads(self, now_s: float) -> bool:
        """Whether this master may answer as the leader at ``now_s``."""
        return self.standing is Standing.LEADING and now_s < self._until_s

    # --- what is seen and answered

    def seen(self, holder: Holder | None, revision: int) -> list[Instruction]:
        """The key as it stands in etcd at ``revision``; what is older than what was seen before is ignored."""
        if revision < self._revision:
            return []
        self._holder, self._revision = holder, revision
        was_leading = self.standing is Standing.LEADING
        if holder is not None and was_leading and holder.term == self.term:
            return []
        self._settle()
        return [StepDown(), *self._revoke()] if was_leading else []

    def lease_granted(self, lease: int, asked_s: float) -> list[Instruction]:
        """The answer to Apply, which was asked at ``asked_s``."""
        if self.standing is not Standing.APPLYING:
            return [Revoke(lease)]
        self._move(Happening.LEASE_GRANTED)
        self._lease = lease
        self._hold(asked_s)
        return [Campaign(lease)]

    def campaigned(self, holder: Holder, revision: int, *, won: bool, now_s: float) -> list[Instruction]:
        """The answer to Campaign: who holds the key at ``revision``."""
        if self.standing is not Standing.CAMPAIGNING:
            return []
        if revision >= self._revision:
            self._holder, self._revision = holder, revision
        if not won:
            self._move(Happening.LOST)
            self._settle()
            return self._revoke()
        self._move(Happening.WON)
        self.leader, self.term = holder.address, holder.term
        if self._holder != holder:  # gone again already
            self._settle()
            return self._revoke()
        if now_s >= self._until_s:
            self._move(Happening.TIME_UP)
            self._settle()
            return self._revoke()
        return [Lead(holder.term)]

    def failed(self, now_s: float) -> list[Instruction]:
        """Apply or Campaign got no answer; the key may be ours all the same, so the lease is given back."""
        if self.standing not in (Standing.APPLYING, Standing.CAMPAIGNING):
            return []
        self._move(Happening.FAILED)
        self._retry_s = now_s + RETRY_S
        self._settle()
        return self._revoke()

    def renewed(self, lease: int, asked_s: float, *, known: bool) -> list[Instruction]:
        """The answer to Renew, which was asked at ``asked_s``; not ``known``: the lease is over."""
        if self.standing is not Standing.LEADING or lease != self._lease:
            return []
        if known:
            self._hold(asked_s)
            return []
        return self._step_down(Happening.LEASE_GONE, asked_s)

    def outranked(self, term: int, now_s: float) -> list[Instruction]:
        """Somebody has heard of the leader of ``term``."""
        if self.standing is not Standing.LEADING or term <= self.term:
            return []
        return self._step_down(Happening.OUTRANKED, now_s)

    def tick(self, now_s: float) -> list[Instruction]:
        """To be called often: leases end, campaigns and renewals fall due."""
        if self.standing is Standing.LEADING:
            if now_s >= self._until_s:
                return self._step_down(Happening.TIME_UP, now_s)
            if now_s >= self._renew_s:
                self._renew_s = now_s + self._ttl_s / RENEWALS
                return [Renew(self._lease)]
        elif self.standing is Standing.VACANT and now_s >= self._retry_s:
            self._move(Happening.RETRY_DUE)
            return [Apply()]
        return []

    def resign(self) -> list[Instruction]:
        """The process ends: let the others elect at once."""
        was_leading = self.standing is Standing.LEADING
        self._move(Happening.RESIGN)
        return [*([StepDown()] if was_leading else []), *self._revoke()]

    # --- inside

    def _move(self, happening: Happening) -> None:
        if self.standing is not Standing.RESIGNED:
            self.standing = TRANSITIONS[self.standing, happening]

    def _settle(self) -> None:
        """Stand as what was last seen of the key says."""
        holder = self._holder
        self._move(Happening.KEY_GONE if holder is None else Happening.KEY_SEEN)
        self.leader = "" if holder is None or holder.term == self.term else holder.address

    def _hold(self, asked_s: float) -> None:
        self._until_s = max(self._until_s, asked_s + self._ttl_s - MARGIN_S)
        self._renew_s = asked_s + self._ttl_s / RENEWALS

    def _step_down(self, happening: Happening, now_s: float) -> list[Instruction]:
        self._move(happening)
        self._retry_s = now_s + RETRY_S
        self._settle()
        return [StepDown(), *self._revoke()]

    def _revoke(self) -> list[Instruction]:
        lease, self._lease, self._until_s = self._lease, 0, 0.0
        return [Revoke(lease)] if lease else []

    def check(self) -> None:
        """A lease is held exactly while campaigning or leading."""
        assert bool(self._lease) == (self.standing in (Standing.CAMPAIGNING, Standing.LEADING))
        assert self.standing is not Standing.LEADING or self.term > 0

    def __repr__(self) -> str:
        return f"Election({self.standing.name}, term {self.term}, leader {self.leader or 'unknown'})"
