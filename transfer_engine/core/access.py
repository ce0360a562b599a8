"""Access rights to ranges of a segment, and their lifetimes: pure decisions, no I/O.

The rule: time alone never frees a range that a peer may still read or write.

* A peer served by copies (TCP) reaches the range only through this process. ``begin()`` refuses it after its lease has
  ended, so the range is free once the lease has ended and no transfer begun under it is open; the server closes
  connections that stall in the middle, which ends their transfer. A lease does not end by time while bytes flow under
  it: an open transfer, or one that has just completed, renews it. Its hard end is the time that its bytes take at the
  least rate, at which the server also cuts connections.
* A peer that maps the memory (shm) cannot be refused anything. When its lease ends by time, or its session is lost, the
  range is quarantined until the peer releases it after all or its pidfd shows that the process has exited. So that
  stuck clients cannot use up the segment, the bytes that one client and all together could bring into quarantine
  (mapped leases) are capped; beyond a cap ``grant(shm=True)`` raises Overloaded and the caller serves that client by
  copies.

* A peer with queue pairs (rdma) reaches every range by itself, but can be stopped: its queue pairs belong to this
  process. From ``begin_one_sided`` on, a lease lost by the session stays open until ``end_one_sided`` reports its queue
  pairs gone; ``on_revoke`` is called with the session's number, once, when they must be closed.

Example: session 7 maps the memory, cap 100 bytes. It pins 60 bytes: granted. It pins 60 more: Overloaded (120 > 100),
so the caller grants them with ``shm=False`` and the client reads over TCP. Its connection breaks: the 60 mapped bytes
are quarantined, the others free at once. Its process exits: the 60 bytes are free.

Every mutating call returns the ranges that it freed. Not thread-safe: one event loop owns a table.

The states of a lease, its events and the table between them:

    (state, event)            table                      worked example
    ACTIVE ---- GIVEN_BACK --> DRAINING -- DRAINED --> FREE   a reader unpins: nothing is open, free at once
    ACTIVE ---- LOST_COPIED -> DRAINING -- DRAINED --> FREE   a TCP reader's time is up while a slice is being sent:
                                                              free when that slice has left or its connection is cut
    ACTIVE ---- LOST_MAPPED -> QUARANTINED -- GIVEN_BACK ...  a reader that maps the memory vanished from the wire:
                                                              kept until it unpins or its process has exited
"""

from __future__ import annotations

import heapq
import hmac
import secrets
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from tanghulu.errors import InvalidRequest, LeaseExpired, Overloaded, Unauthorized
from tanghulu.runtime.clock import LEAST_BYTES_S, Clock
from tanghulu.transfer_engine.core.segment import SECRET_BYTES, SessionKey
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


__all__ = ["AccessTable", "Freed", "Lease", "LeaseState", "Opcode"]

#: Most leases at once; more means that they leak.
MAX_LEASES = 1 << 20
#: Leases ended by one call because of their time or their session, some 10 ms; ``expire`` ends the rest.
MAX_ENDED = 4096
#: Random numbers drawn at a time: a system call for each would double the time of a grant.
_DRAWN = struct.Struct("<256Q")


@dataclass(slots=True)
class _Session:
    session_id: int
    secret: bytes
    pid: int | None
    may_write: bool
    closed: bool = False
    exited: bool = False
    mapped_bytes: int = 0
    num_one_sided: int = 0
    #: Leases lost while queue pairs reached them; each counts as one open transfer.
    revoked: list[LeaseId] = field(default_factory=list)
    leases: dict[LeaseId, Lease] = field(default_factory=dict)
    #: Those that have yet to end because the session has.
    unended: list[Lease] = field(default_factory=list)


class AccessTable:
    """The leases on one segment, by session.

    ``lease_ms`` is the duration of a lease unless ``grant`` states another; ``max_quarantined_bytes_per_session`` caps
    what one client can bring into quarantine, ``max_quarantined_bytes`` what all of them together can (None: the cap of
    one). ``random_bytes`` yields sessions' secrets and the ids of leases.
    """

    def __init__(
        self,
        clock: Clock,
        lease_ms: int,
        max_quarantined_bytes_per_session: int,
        *,
        max_quarantined_bytes: int | None = None,
        max_leases: int = MAX_LEASES,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        assert lease_ms > 0, "a lease lasts longer than nothing"
        assert max_quarantined_bytes_per_session >= 0, "a cap is not negative"
        self.lease_ms = lease_ms
        self.max_quarantined_bytes_per_session = max_quarantined_bytes_per_session
        self.max_quarantined_bytes = max_quarantined_bytes
        #: Called with the session whose queue pairs must be closed; must not call back into the table at once.
        self.on_revoke: Callable[[int], None] | None = None
        self._clock = clock
        self._max_leases = max_leases
        self._random_bytes = random_bytes
        self._numbers = unguessable_numbers(random_bytes)
        self._sessions: dict[int, _Session] = {}
        self._leases: dict[LeaseId, Lease] = {}
        self._mapped_bytes = 0
        self._ending: dict[int, _Session] = {}  # closed sessions with leases yet to end
        self._expiries: list[tuple[float, LeaseId]] = []  # at least one entry, never late, per ACTIVE lease

    # --- sessions

    def open_session(self, session_id: int, pid: int | None, *, may_write: bool = False) -> SessionKey:
        """Admit a peer; return the secret that its data connections show to ``authenticate``.

        ``pid`` is its process on this host as reported by the kernel (SO_PEERCRED), None for a remote peer.

        Only a session with a pid can hold leases with ``shm=True``. Unless it ``may_write``, it can map the segment for
        reading only. Raises InvalidRequest if the number is in use (also by a lost session whose ranges are still in
        quarantine).
        """
        if session_id in self._sessions:
            raise InvalidRequest(f"session {session_id} is open already; give every session a number of its own")
        secret = self._random_bytes(SECRET_BYTES)
        self._sessions[session_id] = _Session(session_id, secret, pid, may_write)
        return SessionKey(session_id, secret)

    def authenticate(self, shown: SessionKey) -> None:
        """Raise Unauthorized unless the session is open and the secret shown is its own."""
        session = self._sessions.get(shown.session_id)
        secret = bytes(SECRET_BYTES) if session is None else session.secret
        if not hmac.compare_digest(secret, shown.secret) or session is None or session.closed:
            raise Unauthorized(f"session {shown.session_id} is not open, or its secret is another; send HELLO first")

    def close_session(self, session_id: int) -> list[Freed]:
        """End the leases of a peer whose connection is gone, quarantining those that it maps. Ignores unknown ones."""
        session = self._sessions.get(session_id)
        if session is None:
            return []
        return self._begin_ending(session)

    def session_exited(self, session_id: int) -> list[Freed]:
        """Record that the peer's process has exited (by its pidfd): it cannot touch mapped memory any more."""
        session = self._sessions.get(session_id)
        if session is None:
            return []
        session.exited = True
        return self._begin_ending(session)

    def has_session(self, session_id: int) -> bool:
        """Return whether the session is open, or lost with ranges not yet free."""
        return session_id in self._sessions

    def is_open(self, session_id: int) -> bool:
        """Return whether the session is open."""
        session = self._sessions.get(session_id)
        return session is not None and not session.closed

    def session_pid(self, session_id: int) -> int | None:
        """Return the pid given to ``open_session``; None for a remote peer. Raises InvalidRequest if not open."""
        return self._open_session(session_id).pid

    def may_write(self, session_id: int) -> bool:
        """Return whether the session may map the segment for writing. Raises InvalidRequest if not open."""
        return self._open_session(session_id).may_write

    # --- queue pairs, which reach every range without a request

    def begin_one_sided(self, session_id: int) -> None:
        """Record that a queue pair of the session works from now on. Raises InvalidRequest if the session is closed."""
        self._open_session(session_id).num_one_sided += 1

    def end_one_sided(self, session_id: int) -> list[Freed]:
        """Record that one of the session's queue pairs is gone; the last one frees the ranges that it kept."""
        session = self._sessions.get(session_id)
        assert session is not None, f"session {session_id} is unknown"
        assert session.num_one_sided > 0, f"session {session_id} has no queue pair"
        session.num_one_sided -= 1
        freed: list[Freed] = []
        if session.num_one_sided == 0:
            revoked, session.revoked = session.revoked, []
            for lease_id in revoked:
                freed += self.end(lease_id)
        self._forget_if_empty(session)
        return freed

    # --- leases

    def grant(
        self,
        session_id: int,
        offset: int,
        length: int,
        mode: Opcode,
        lease_ms: int | None = None,
        *,
        shm: bool = False,
    ) -> LeaseId:
        """Let the session READ or WRITE ``[offset, offset + length)``; with ``shm``, through its own mapping.

        A WRITE range overlaps no other lease: the caller allocates, ``check`` asserts it. Raises Overloaded if there
        are too many leases or the mapped bytes would exceed a cap (then grant without ``shm`` and serve copies);
        InvalidRequest for a session that is not open or, with ``shm``, has no pid.
        """
        assert offset >= 0, "a range starts inside the segment"
        assert length > 0, "a range has at least one byte"
        session = self._open_session(session_id)
        if len(self._leases) >= self._max_leases:
            raise Overloaded(f"{len(self._leases)} leases are held on this segment; release some")
        if shm:
            self._admit_mapped(session, length)
        expires_at_s = self._clock.now_s() + (lease_ms or self.lease_ms) / 1000
        last_end_s = expires_at_s + length / LEAST_BYTES_S
        lease = Lease(LeaseId(next(self._numbers)), session_id, offset, length, mode, shm, expires_at_s, last_end_s)
        self._insert(session, lease)
        return lease.lease_id

    def is_active(self, lease_id: LeaseId) -> bool:
        """Return whether transfers may begin under the lease now; checked when a reservation is committed."""
        lease = self._leases.get(lease_id)
        return lease is not None and _is_active(lease, self._clock.now_s())

    def lease(self, lease_id: LeaseId) -> Lease | None:
        """Return the lease in its present state (do not change it), or None when it is free or was never granted."""
        return self._leases.get(lease_id)

    def release(self, lease_id: LeaseId) -> list[Freed]:
        """Give the range back for its holder. A lease already ended frees nothing: numbers are never reused."""
        lease = self._leases.get(lease_id)
        freed: list[Freed] = []
        if lease is not None:
            self._step(lease, LeaseEvent.GIVEN_BACK, freed)
        return freed

    def expire(self, now_s: float) -> list[Freed]:
        """End the leases expired at ``now_s`` with no bytes flowing under them, and those of ended sessions.

        At most MAX_ENDED at a time; no transfer begins under the others meanwhile.
        """
        freed, left = self._end_some(MAX_ENDED)
        due: list[Lease] = []
        while self._expiries and self._expiries[0][0] <= now_s and len(due) < left:
            _, lease_id = heapq.heappop(self._expiries)
            lease = self._leases.get(lease_id)
            if lease is None or lease.state is not LeaseState.ACTIVE:
                continue
            if lease.num_open:
                self._renew(lease, now_s)
            if lease.expires_at_s > now_s:  # renewed since
                heapq.heappush(self._expiries, (lease.expires_at_s, lease_id))
            else:
                due.append(lease)
        return freed + self._lose(due)

    # --- transfers that this process serves

    def begin(self, session_id: int, lease_id: LeaseId, op: Opcode, offset: int, length: int) -> None:
        """Admit one transfer; call ``end`` when its last byte was moved or its connection is closed.

        Raises LeaseExpired if the lease has ended or was never granted to this session; InvalidRequest if it does not
        allow ``op`` or does not cover the range.
        """
        lease = self._leases.get(lease_id)
        if lease is None or lease.session_id != session_id:
            raise LeaseExpired(f"session {session_id} has no lease {lease_id}; reserve or pin again")
        if self._sessions[session_id].closed:
            raise LeaseExpired(f"session {session_id} has ended, and its lease {lease_id} with it")
        if not _is_active(lease, self._clock.now_s()):
            raise LeaseExpired(f"lease {lease_id} has ended ({lease.state.value}); reserve or pin again")
        if lease.mode is not op:
            raise InvalidRequest(f"lease {lease_id} is for {lease.mode.name}, not for {op.name}")
        if offset < lease.offset or offset + length > lease.offset + lease.length:
            raise InvalidRequest(
                f"[{offset}, +{length}) is not inside lease {lease_id}'s [{lease.offset}, +{lease.length})"
            )
        lease.num_open += 1

    def end(self, lease_id: LeaseId, *, moved: bool = False) -> list[Freed]:
        """Record that a begun transfer cannot touch the range any more. ``moved``: it completed, renewing the lease."""
        lease = self._leases[lease_id]
        if moved and lease.state is LeaseState.ACTIVE:
            self._renew(lease, self._clock.now_s())
        assert lease.num_open > 0, f"lease {lease_id} has no begun transfer"
        lease.num_open -= 1
        freed: list[Freed] = []
        if lease.num_open == 0 and lease.state is LeaseState.DRAINING:
            self._free(lease, freed)
        return freed

    # --- questions

    def busy(self, offset: int, length: int) -> bool:
        """Return whether a lease not yet free overlaps ``[offset, offset + length)``; looks at all of them."""
        return any(
            each.offset < offset + length and offset < each.offset + each.length for each in self._leases.values()
        )

    @property
    def num_leases(self) -> int:
        """Number of leases not yet free."""
        return len(self._leases)

    @property
    def quarantined_bytes(self) -> int:
        """Bytes not reusable because a vanished peer may still map them; overlapping leases count each."""
        return sum(each.length for each in self._leases.values() if each.state is LeaseState.QUARANTINED)

    def check(self) -> None:
        """Assert the invariants: one index per question, all consistent; no writer in a range that others may touch."""
        assert {each for session in self._sessions.values() for each in session.leases} == set(self._leases)
        queued = {lease_id for _, lease_id in self._expiries}
        for lease in self._leases.values():
            assert lease.state is not LeaseState.FREE
            assert lease.state is not LeaseState.DRAINING or lease.num_open > 0
            assert lease.state is not LeaseState.QUARANTINED or lease.mapped
            assert lease.state is not LeaseState.ACTIVE or lease.lease_id in queued
            assert lease.expires_at_s <= lease.last_end_s
        self._check_writers()
        for session in self._ending.values():
            assert session.closed
            assert session.unended
        for session in self._sessions.values():
            assert session.leases or session.num_one_sided or not session.closed
            assert set(session.revoked) <= set(session.leases)
            assert session.num_one_sided or not session.revoked
            mapped = sum(each.length for each in session.leases.values() if each.mapped)
            assert mapped == session.mapped_bytes <= self.max_quarantined_bytes_per_session
        assert self._mapped_bytes == sum(session.mapped_bytes for session in self._sessions.values())
        assert self.max_quarantined_bytes is None or self._mapped_bytes <= self.max_quarantined_bytes

    def _check_writers(self) -> None:
        end = written_end = 0  # of all ranges so far, and of the written ones
        for lease in sorted(self._leases.values(), key=lambda each: each.offset):
            exclusive = lease.mode is Opcode.WRITE
            assert lease.offset >= (end if exclusive else written_end), f"{lease} is leased to somebody else"
            end = max(end, lease.offset + lease.length)
            written_end = max(written_end, lease.offset + lease.length) if exclusive else written_end

    def __repr__(self) -> str:
        return f"AccessTable({len(self._sessions)} sessions, {len(self._leases)} leases)"

    # --- inside

    def _open_session(self, session_id: int) -> _Session:
        session = self._sessions.get(session_id)
        if session is None or session.closed:
            raise InvalidRequest(f"session {session_id} is not open; send HELLO first")
        return session

    def _admit_mapped(self, session: _Session, length: int) -> None:
        if session.pid is None:
            raise InvalidRequest(f"session {session.session_id} has no process on this host; it cannot map memory")
        wanted_bytes = session.mapped_bytes + length
        if wanted_bytes > self.max_quarantined_bytes_per_session:
            raise Overloaded(
                f"session {session.session_id} would hold {wanted_bytes} mapped bytes of at most "
                f"{self.max_quarantined_bytes_per_session}; give it copies"
            )
        together_bytes = self._mapped_bytes + length
        if self.max_quarantined_bytes is not None and together_bytes > self.max_quarantined_bytes:
            raise Overloaded(
                f"all sessions would hold {together_bytes} mapped bytes of at most {self.max_quarantined_bytes}; give "
                "copies"
            )

    def _renew(self, lease: Lease, now_s: float) -> None:
        """Lengthen a lease, counted from now, up to its hard end; never shorten it."""
        lease.expires_at_s = max(lease.expires_at_s, min(now_s + self.lease_ms / 1000, lease.last_end_s))

    def _insert(self, session: _Session, lease: Lease) -> None:
        self._leases[lease.lease_id] = session.leases[lease.lease_id] = lease
        mapped_bytes = lease.length if lease.mapped else 0
        session.mapped_bytes += mapped_bytes
        self._mapped_bytes += mapped_bytes
        if len(self._expiries) > 2 * len(self._leases) + 64:  # most of it are leases released early
            self._expiries = [
                (each.expires_at_s, key) for key, each in self._leases.items() if each.state is LeaseState.ACTIVE
            ]
            heapq.heapify(self._expiries)
        else:
            heapq.heappush(self._expiries, (lease.expires_at_s, lease.lease_id))

    def _begin_ending(self, session: _Session) -> list[Freed]:
        """End the session's leases: the first now, the others with ``expire``, so that no step takes long."""
        session.closed = True
        session.unended = list(session.leases.values())
        self._ending[session.session_id] = session
        return self._end_some(MAX_ENDED)[0]

    def _end_some(self, most: int) -> tuple[list[Freed], int]:
        """End that number of leases of ended sessions; return what this freed, and how many more could have ended."""
        freed: list[Freed] = []
        for session_id, session in list(self._ending.items()):
            while session.unended and most:
                self._end_with_session(session, session.unended.pop(), freed)
                most -= 1
            if session.unended:
                break
            del self._ending[session_id]
            if session.num_one_sided and not session.revoked and self.on_revoke is not None:
                self.on_revoke(session_id)
            self._forget_if_empty(session)
        return freed, most

    def _end_with_session(self, session: _Session, lease: Lease, freed: list[Freed]) -> None:
        if lease.lease_id not in self._leases:  # returned meanwhile
            return
        if not session.exited:
            freed += self._lose([lease])
            return
        if session.num_one_sided and not lease.mapped:  # data already sent may still be on the wire to our queue pairs
            freed += self._lose([lease])
        if lease.lease_id in self._leases:
            self._step(lease, LeaseEvent.GIVEN_BACK, freed)

    def _lose(self, leases: Iterable[Lease]) -> list[Freed]:
        freed: list[Freed] = []
        for lease in leases:
            self._revoke(lease)
            self._step(lease, LeaseEvent.LOST_MAPPED if lease.mapped else LeaseEvent.LOST_COPIED, freed)
        return freed

    def _revoke(self, lease: Lease) -> None:
        """Keep the range of an active lease from being freed while queue pairs reach it."""
        session = self._sessions[lease.session_id]
        if session.num_one_sided == 0 or lease.mapped or lease.state is not LeaseState.ACTIVE:
            return
        lease.num_open += 1
        session.revoked.append(lease.lease_id)
        if len(session.revoked) == 1 and self.on_revoke is not None:
            self.on_revoke(session.session_id)

    def _step(self, lease: Lease, event: LeaseEvent, freed: list[Freed]) -> None:
        if lease.step(event) is LeaseState.DRAINING and lease.num_open == 0:
            self._free(lease, freed)

    def _free(self, lease: Lease, freed: list[Freed]) -> None:
        lease.step(LeaseEvent.DRAINED)
        session = self._sessions[lease.session_id]
        del self._leases[lease.lease_id], session.leases[lease.lease_id]
        mapped_bytes = lease.length if lease.mapped else 0
        session.mapped_bytes -= mapped_bytes
        self._mapped_bytes -= mapped_bytes
        freed.append(Freed(lease.lease_id, lease.offset, lease.length))
        self._forget_if_empty(session)

    def _forget_if_empty(self, session: _Session) -> None:
        if session.closed and not session.leases and session.num_one_sided == 0:
            self._sessions.pop(session.session_id, None)


def _is_active(lease: Lease, now_s: float) -> bool:
    end_s = lease.last_end_s if lease.num_open else lease.expires_at_s
    return lease.state is LeaseState.ACTIVE and now_s < end_s


def unguessable_numbers(random_bytes: Callable[[int], bytes] = secrets.token_bytes) -> Iterator[int]:
    """Return numbers of 63 random bits, none of them 0: some of them reveal nothing about the others."""
    while True:
        for number in _DRAWN.unpack(random_bytes(_DRAWN.size)):
            if number >> 1:
                yield number >> 1
