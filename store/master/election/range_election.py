"""Ownership of ranges by one of several masters, and leadership: the decisions, without I/O.

``ownership`` is the driver.

Every range has a key in etcd, which is its lock: the master whose lease it is attached to owns the range, and the
revision at which it was written is the range's *term*. A master has one lease for all its keys. A key vanishes with its
owner's lease, and is then written by another master if it is absent; only the owner itself may rewrite it, to hand the
range over.

    VACANT --KEY_OURS--> OWNED --GIVEN_UP--> HANDING_OVER --KEY_OTHERS--> FOLLOWING
      ^                    |                      |  |                        |
      |                    +------LEASE_OVER------+  +--KEY_OURS--> OWNED     +--KEY_OURS--> OWNED
      |                    v
      +-----KEY_GONE---- LOST        KEY_GONE leads to VACANT, and KEY_OTHERS to FOLLOWING, from every state

One more key, the leader's, is under the same lease: any master that finds it absent claims it, and it is never handed
over. Its owner leads while its lease is valid: it alone admits nodes, places chunks and reports the members.

A master believes about keys only what its watch reports, never the answers to its own writes, so that it has seen every
change up to the revision of its own term before it serves a range: including the admitted nodes.

Why two masters never serve a range at the same time:
- A lease is counted by this master's clock from before its request, MARGIN_S less than by etcd. When it has ended this
  master owns nothing, and it never accepts a key attached to a lease that it has given up.
- A range is given up before the key is rewritten, and whatever happens to that call, this term is never served again:
  the key is rewritten, guarded by its term, until it has a later one, possibly for the same master.
- For a clock that stopped with its machine see ``protocol.terms.LeaseProofs``. Confirmed renewals of a lease are
  reported only while a range is owned under it, so the map's version has changed since the lease before: answers given
  under that one are never proven by a renewal of this one.

Example with ttl 2 s: A owns range 5 in term 40. B joins, and 0.5 s later, when no other has come or gone, A gives range
5 up and rewrites its key for B, which sees it at revision 57 and answers in term 57. B stops; at its lease's end its
keys vanish together, A is the standby of range 5, claims it at once, and owns it in term 63. C, which would have been
next, waits for 0.3 s and finds the key taken.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from tanghulu.store.master.election.masters_view import KeySeen, MastersView
from tanghulu.store.protocol.key_slots import NUM_RANGES
from tanghulu.store.protocol.terms import MARGIN_S, Renewals

#: Renewals requested during one lease.
RENEWALS = 6
#: Pause between a write that was answered, or will not be, and the next of that key.
RETRY_S = 0.1
#: Time for which a vacant range is left to the master that should own it.
OTHERS_WAIT_S = 0.3
#: Ranges are handed over when no master has come or gone for this time.
SETTLE_S = 0.5


class RangeState(Enum):
    """The states of a range, as seen by one master."""

    VACANT = "nobody owns it; who should own it claims it, the others a little later"
    OWNED = "this master answers for it while its lease lives"
    HANDING_OVER = "this master has given it up, and the key does not name another yet"
    LOST = "this master's lease is over, and the key may still name it"
    FOLLOWING = "another master owns it"


class RangeEvent(Enum):
    """The events that change the state of a range."""

    KEY_GONE = "the range has no key"
    KEY_OURS = "the key is under this master's lease, in a term that it has not given up"
    KEY_STALE = "the key names this master, under a lease that it holds no longer"
    KEY_OTHERS = "the key names another master"
    GIVEN_UP = "another master should own it"
    LEASE_OVER = "this master's lease is over"


_S, _E = RangeState, RangeEvent
RANGE_TRANSITIONS: dict[tuple[RangeState, RangeEvent], RangeState] = {
    **{(state, _E.KEY_GONE): _S.VACANT for state in _S},
    **{(state, _E.KEY_OURS): _S.OWNED for state in _S},
    **{(state, _E.KEY_STALE): _S.LOST for state in _S},
    **{(state, _E.KEY_OTHERS): _S.FOLLOWING for state in _S},
    (_S.OWNED, _E.GIVEN_UP): _S.HANDING_OVER,
    (_S.OWNED, _E.LEASE_OVER): _S.LOST,
    (_S.HANDING_OVER, _E.LEASE_OVER): _S.LOST,
}


@dataclass(frozen=True, slots=True)
class Apply:
    """Request a lease; answer with ``lease_granted`` or ``apply_failed``."""


@dataclass(frozen=True, slots=True)
class Renew:
    """Renew the lease; answer with ``renewed``. A failed renewal needs no answer: the next follows soon."""

    lease: int
    number: int = 0


@dataclass(frozen=True, slots=True)
class Revoke:
    """Return the lease, and with it all keys under it."""

    lease: int


@dataclass(frozen=True, slots=True)
class Lead:
    """Begin to lead."""

    term: int


@dataclass(frozen=True, slots=True)
class StepDown:
    """Stop leading."""


@dataclass(frozen=True, slots=True)
class Announce:
    """Write this master's own key under the lease; answer with ``done``."""

    lease: int


@dataclass(frozen=True, slots=True)
class Claim:
    """Write the keys of ``ranges`` under the lease, each if it is absent; answer with ``done``."""

    lease: int
    ranges: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ClaimLead:
    """Write the leader's key under the lease if it is absent; answer with ``done``."""

    lease: int


@dataclass(frozen=True, slots=True)
class HandOver:
    """Rewrite the keys of ranges under ``lease`` of ``owner``, each if it still has its term; answer with ``done``.

    ``owner`` may be this master itself: then it takes the range back, in a later term.
    """

    owner: str
    lease: int
    terms: tuple[tuple[int, int], ...]  # range, term

    @property
    def ranges(self) -> tuple[int, ...]:
        """The ranges whose keys are rewritten."""
        return tuple(number for number, _ in self.terms)


@dataclass(frozen=True, slots=True)
class Own:
    """Begin to serve a range, with an empty directory."""

    number: int
    term: int


@dataclass(frozen=True, slots=True)
class Disown:
    """Stop serving a range, and forget its contents."""

    number: int


RangeInstruction: TypeAlias = (
    Apply | Renew | Revoke | Announce | Claim | ClaimLead | HandOver | Own | Disown | Lead | StepDown
)


class RangeElection:
    """One master's ranges. ``now_s`` is of a monotonic clock that never stops with the process."""

    def __init__(self, master_id: str, ttl_s: float) -> None:
        assert ttl_s > 2 * MARGIN_S
        self.view = MastersView()
        self.states = [RangeState.VACANT] * NUM_RANGES
        self._owned: frozenset[int] | None = frozenset()  # those in state OWNED; None: to be counted
        self.num_requested = 0  # renewals, the grants of leases among them
        self.num_confirmed = 0  # the last of them confirmed by etcd
        self.term = 0  # in which this master leads, or led last
        self._is_leading = False
        self._id = master_id
        self._ttl_s = ttl_s
        self._has_resigned = False
        self._lease = 0
        self._until_s = 0.0  # end of the lease for this master
        self._renew_s = 0.0
        self._applying = False
        self._apply_s = 0.0  # earliest time to request a lease
        self._announce_s: float | None = 0.0  # earliest time to write its own key; None: it is being written
        self._lead_s: float | None = 0.0  # the same of the leader's key
        self._vacant_s = [0.0] * NUM_RANGES  # since when it has had no owner
        self._write_s: list[float | None] = [0.0] * NUM_RANGES  # the same of each range's key
        self._given_up = [0] * NUM_RANGES  # the last term of each range given up by this master
        self._settled_s = 0.0  # earliest time to hand over ranges

    # --- questions

    @property
    def has_begun(self) -> bool:
        """Whether etcd's keys have been seen at all."""
        return self.view.revision > 0

    def leads(self, now_s: float) -> bool:
        """Return whether this master may answer as the leader at ``now_s``."""
        return self._is_leading and now_s < self._until_s

    def owned(self, now_s: float) -> frozenset[int]:
        """Return the ranges that this master may serve at ``now_s``."""
        if now_s >= self._until_s:
            return frozenset()
        if self._owned is None:
            self._owned = frozenset(self._in(RangeState.OWNED))
        return self._owned

    def renewals(self, now_s: float) -> Renewals:
        """Return the renewals of this master's lease, as counted by callers; no confirmed one while it owns no range.

        It is never 0, which would mean that no proof is needed.
        """
        return Renewals(self.num_requested or 1, self.num_confirmed if self.owned(now_s) else 0)

    # --- events: reports of the watch

    def snapshot(self, keys: Iterable[KeySeen], revision: int, now_s: float) -> list[RangeInstruction]:
        """Take all keys at ``revision``; ignore a snapshot older than what was seen."""
        if revision < self.view.revision:
            return []
        masters = self.view.masters
        if not self.has_begun:
            self._vacant_s = [now_s] * NUM_RANGES
        self.view.begin(keys, revision)
        return self._seen(self.view.masters != masters, now_s)

    def seen(self, changes: Iterable[KeySeen], now_s: float) -> list[RangeInstruction]:
        """Take the changes of a revision, or of several in order."""
        masters = dict(self.view.masters)
        self.view.change(changes)
        return self._seen(self.view.masters != masters, now_s)

    # --- events: answers

    def lease_granted(self, lease: int, asked_s: float, now_s: float) -> list[RangeInstruction]:
        """Take the answer to Apply, which was requested at ``asked_s``."""
        if not self._applying or asked_s + self._ttl_s - MARGIN_S <= now_s:
            self._applying = False
            return [Revoke(lease)]
        self._applying = False
        self._lease, self._announce_s = lease, now_s
        self.num_requested += 1
        self._hold(asked_s, self.num_requested)
        return self._act(now_s)

    def apply_failed(self, now_s: float) -> None:
        """Record that Apply got no answer."""
        self._applying, self._apply_s = False, now_s + RETRY_S

    def renewed(self, renewal: Renew, asked_s: float, now_s: float, *, known: bool) -> list[RangeInstruction]:
        """Take the answer to Renew, which was requested at ``asked_s``; not ``known``: the lease has ended."""
        if renewal.lease != self._lease:
            return []
        if known:
            self._hold(asked_s, renewal.number)
            return []
        return self._lease_over(now_s)

    def done(self, written: Announce | Claim | ClaimLead | HandOver, now_s: float) -> None:
        """Record that a write has ended, answered or not; the watch reports whether it took effect."""
        if isinstance(written, Announce):
            if written.lease == self._lease:
                self._announce_s = now_s + RETRY_S
            return
        if isinstance(written, ClaimLead):
            self._lead_s = now_s + RETRY_S
            return
        for number in written.ranges:
            self._write_s[number] = now_s + RETRY_S

    # --- events: time

    def renew(self, now_s: float) -> list[RangeInstruction]:
        """Request a renewal now; nothing without a lease."""
        if not self._lease:
            return []
        self._renew_s = now_s + self._ttl_s / RENEWALS
        self.num_requested += 1
        return [Renew(self._lease, self.num_requested)]

    def tick(self, now_s: float) -> list[RangeInstruction]:
        """Advance the time: end the lease, or start due renewals and writes; called often."""
        over = self._lease_over(now_s) if self._lease and now_s >= self._until_s else []
        renewals = self.renew(now_s) if self._lease and now_s >= self._renew_s else []
        return [*over, *renewals, *self._act(now_s)]

    def resign(self, now_s: float) -> list[RangeInstruction]:
        """Release everything, as the process ends."""
        self._has_resigned = True
        return self._lease_over(now_s)

    # --- inside: the lease

    def _hold(self, asked_s: float, number: int) -> None:
        self.num_confirmed = max(self.num_confirmed, number)
        self._until_s = max(self._until_s, asked_s + self._ttl_s - MARGIN_S)
        self._renew_s = max(self._renew_s, asked_s + self._ttl_s / RENEWALS)

    def _lease_over(self, now_s: float) -> list[RangeInstruction]:
        lease, self._lease, self._until_s, self._renew_s = self._lease, 0, 0.0, 0.0
        self._applying, self._apply_s = False, now_s + RETRY_S
        stepped_down, self._is_leading = self._is_leading, False
        disowned = self._in(RangeState.OWNED)
        for number in [*disowned, *self._in(RangeState.HANDING_OVER)]:
            self._move(number, RangeEvent.LEASE_OVER)
        steps: list[RangeInstruction] = [StepDown()] if stepped_down else []
        return [*steps, *map(Disown, disowned), *([Revoke(lease)] if lease else [])]

    # --- inside: the ranges

    def _in(self, state: RangeState) -> list[int]:
        return [number for number, each in enumerate(self.states) if each is state] if state in self.states else []

    def _move(self, number: int, event: RangeEvent) -> None:
        before = self.states[number]
        self.states[number] = after = RANGE_TRANSITIONS[before, event]
        if RangeState.OWNED in (before, after) and before is not after:
            self._owned = None

    def _seen(self, is_other_set: bool, now_s: float) -> list[RangeInstruction]:
        """Bring every range into the state given by its key, then act."""
        if is_other_set:
            self._settled_s = now_s + SETTLE_S
        instructions: list[RangeInstruction] = []
        for number, before in enumerate(self.states):
            event = self._event_of(number)
            if event is None:
                continue
            self._move(number, event)
            now = self.states[number]
            holder = self.view.holders[number]
            if before is RangeState.OWNED and now is not before:
                instructions.append(Disown(number))
            elif now is RangeState.OWNED and before is not now and holder is not None:
                instructions.append(Own(number, holder.term))
            elif now is RangeState.VACANT and before is not now:
                self._vacant_s[number] = now_s
        return [*instructions, *self._see_leader(), *self._act(now_s)]

    def _see_leader(self) -> list[RangeInstruction]:
        """Lead in the term of the leader's key if it is under this master's lease; otherwise do not."""
        view = self.view
        is_mine = view.leader is not None and view.leader_lease == self._lease != 0
        if self._is_leading and is_mine and view.leader_term == self.term:
            return []
        stepped_down, self._is_leading = self._is_leading, is_mine
        if is_mine:
            self.term = view.leader_term
        return [*([StepDown()] if stepped_down else []), *([Lead(self.term)] if is_mine else [])]

    def _event_of(self, number: int) -> RangeEvent | None:
        """Return the state of a range's key; None: nothing new, as this master has given it up in that very term."""
        holder = self.view.holders[number]
        if holder is None:
            return RangeEvent.KEY_GONE
        if holder.owner != self._id:
            return RangeEvent.KEY_OTHERS
        if holder.lease != self._lease:
            return RangeEvent.KEY_STALE
        return RangeEvent.KEY_OURS if holder.term > self._given_up[number] else None

    def _act(self, now_s: float) -> list[RangeInstruction]:
        """Return due instructions: lease, own key, keys of vacant ranges, and those of other masters."""
        if self._has_resigned or not self.has_begun:
            return []
        if not self._lease:
            if self._applying or now_s < self._apply_s:
                return []
            self._applying = True
            return [Apply()]
        if self.view.leases.get(self._id) != self._lease:
            if self._announce_s is None or now_s < self._announce_s:
                return []
            self._announce_s = None
            return [Announce(self._lease)]
        return [*self._claim_lead(now_s), *self._claim(now_s), *self._give_up(now_s), *self._hand_over(now_s)]

    def _claim_lead(self, now_s: float) -> list[RangeInstruction]:
        if self.view.leader is not None or self._lead_s is None or now_s < self._lead_s:
            return []
        self._lead_s = None
        return [ClaimLead(self._lease)]

    def _claim(self, now_s: float) -> list[RangeInstruction]:
        wanted = self.view.wanted
        ranges = []
        for number in self._in(RangeState.VACANT):
            waits_s = 0.0 if wanted[number] == self._id else OTHERS_WAIT_S
            if now_s >= self._vacant_s[number] + waits_s and self._may_write(number, now_s):
                ranges.append(number)
        for number in ranges:
            self._write_s[number] = None
        return [Claim(self._lease, tuple(ranges))] if ranges else []

    def _give_up(self, now_s: float) -> list[RangeInstruction]:
        if now_s < self._settled_s:
            return []
        wanted = self.view.wanted
        ranges = [number for number in self._in(RangeState.OWNED) if wanted[number] not in ("", self._id)]
        for number in ranges:
            holder = self.view.holders[number]
            assert holder is not None, "who owns a range has seen its key"
            self._given_up[number] = holder.term
            self._move(number, RangeEvent.GIVEN_UP)
        return list(map(Disown, ranges))

    def _hand_over(self, now_s: float) -> list[RangeInstruction]:
        wanted = self.view.wanted
        by_owner: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for number in self._in(RangeState.HANDING_OVER):
            if self._may_write(number, now_s):
                by_owner[wanted[number] or self._id].append((number, self._given_up[number]))
                self._write_s[number] = None
        return [HandOver(owner, self.view.leases[owner], tuple(terms)) for owner, terms in by_owner.items()]

    def _may_write(self, number: int, now_s: float) -> bool:
        write_s = self._write_s[number]
        return write_s is not None and now_s >= write_s

    def check(self) -> None:
        """Assert that owned ranges are held under this master's lease, in a term that it has not given up."""
        self.view.check()
        assert 0 <= self.num_confirmed <= self.num_requested
        assert bool(self._lease) == (self._until_s > 0.0)
        assert self._owned is None or self._owned == set(self._in(RangeState.OWNED))
        assert not self._is_leading or self.view.leader_lease == self._lease != 0
        for number, state in enumerate(self.states):
            holder = self.view.holders[number]
            if state is RangeState.OWNED:
                assert holder is not None
                assert holder.owner == self._id
                assert holder.lease == self._lease != 0
                assert holder.term > self._given_up[number]
            elif state is RangeState.HANDING_OVER:
                assert holder is not None
                assert holder.term == self._given_up[number]
            elif self.has_begun:
                assert (state is RangeState.VACANT) == (holder is None)

    def __repr__(self) -> str:
        num_owned, num_vacant = len(self._in(RangeState.OWNED)), len(self._in(RangeState.VACANT))
        return f"RangeElection({self._id}, {num_owned} owned, {num_vacant} vacant)"
