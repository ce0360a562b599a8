"""Terms of elected masters, the fence against old ones, and the proof that a master still leads. Pure."""

from __future__ import annotations

import threading
from typing import NamedTuple

from tanghulu.rpc.wire import U64


class Term(NamedTuple):
    """The ``number`` of an election, counted by the etcd with the id ``cluster``; 0 means no election."""

    number: U64 = 0
    cluster: U64 = 0


class Signature(NamedTuple):
    """The end of a master's reply: its term, and the renewals of its lease as one number, see ``Renewals``.

    The term of one of several owners is the latest version of the map that it knows.
    """

    term: Term = Term()
    renewals: U64 = 0


NO_TERM = Term()
UNSIGNED = Signature()
#: Time by which a lease ends sooner for a master, and for each of its callers, than for etcd: clocks drift, and an
#: answer may be in flight.
MARGIN_S = 0.3
#: Answers kept for a proof to come: this many renewals may be in flight at one time.
MAX_ANSWERS = 8


class Renewals(NamedTuple):
    """Renewals of a master's lease: the number ``requested`` of etcd, and the latest one ``confirmed`` by it.

    They travel as one number; 0, of a master that was not elected, carries no information.
    """

    requested: int = 0
    confirmed: int = 0

    @property
    def packed(self) -> int:
        """Both as one number of 64 bits."""
        return self.requested << 32 | self.confirmed

    @classmethod
    def of(cls, packed: int) -> Renewals:
        """Return the renewals encoded in ``packed``."""
        return cls(packed >> 32, packed & 0xFFFF_FFFF)


class TermFence:
    """The masters that a process still obeys: none whose term has ended.

    Each election of a master has a term, a number that only grows (the revision at which etcd wrote the leader's key).
    A process that has seen term 9 rejects answers from a master of term 7, even if that master is still running: it was
    stopped while it was deposed, its clock perhaps with it, and its successor has made other decisions since. Terms are
    compared within one etcd only, so that a newly created etcd does not lose against the memory of its predecessor. A
    master that was not elected sends term 0 and is obeyed: there is only one. Safe to use from several threads.
    """

    def __init__(self) -> None:
        self.newest = Term()
        self._lock = threading.Lock()

    def admits(self, term: Term) -> bool:
        """Return whether to obey a master of ``term``; remembers it if it is the newest."""
        if not term.number or self.newest == term:
            return True
        with self._lock:
            if term.cluster == self.newest.cluster and term.number < self.newest.number:
                return False
            self.newest = term
            return True

    def is_over(self, term: Term) -> bool:
        """Return whether a later term is known, whose master may not know what that of ``term`` accepts."""
        return term.cluster == self.newest.cluster and 0 < term.number < self.newest.number

    def __repr__(self) -> str:
        return f"TermFence({self.newest.number} of {self.newest.cluster:x})"


class LeaseProofs:
    """The time until which a caller may assume that a master still leads, by the caller's own clock.

    The clock of a stopped virtual machine stands still, and a leader in it considers its lease valid for the time it
    had left, while another leads. So its own claim is no proof. Proof is this: the answer to a call sent at T reported
    N requested renewals, and a later answer reports that renewal N + 1 or a later one is confirmed. That one was
    requested after T, so at T etcd still had the lease, which lasts ``ttl_s`` at least from then. A master that leads a
    term now has led it all the time, so an answer that came before its proof is proven by it. Confirmation of any
    renewal is not enough: it may have been in flight when the call was sent, in the socket of the stopped machine.

    Example with ttl 3 s: a call of 10.0 s is answered "requested 41, confirmed 41", one of 10.6 s "requested 42,
    confirmed 42": answers are accepted until 10.0 + 3 - 0.3 = 12.7 s. Safe to use from several threads.
    """

    def __init__(self) -> None:
        self._term = NO_TERM
        self._ttl_s = 0.0
        self._proven = NO_TERM, float("-inf")  # term and end; replaced in one step
        self._answers: list[tuple[int, float]] = []  # (renewals requested, time of the call), both growing
        self._last = Renewals()
        self._packed = 0  # the same, of a reply
        self._lock = threading.Lock()

    def record(self, term: Term, sent_s: float, renewals: Renewals, ttl_s: float = 0.0) -> None:
        """Record an answer of a master of ``term`` to a call sent at ``sent_s``; ``ttl_s``: its lease, if reported."""
        with self._lock:
            if term != self._term:
                if term.cluster == self._term.cluster and term.number < self._term.number:
                    return
                self._term, self._ttl_s, self._last, self._answers = term, 0.0, Renewals(), []
                self._proven = term, float("-inf")
            self._note(renewals.requested, sent_s)
            if renewals != self._last or ttl_s:  # otherwise nothing is new, as between two renewals
                self._ttl_s, self._last = ttl_s or self._ttl_s, renewals
                self._prove(sent_s, renewals)

    def answered(self, signature: Signature, sent_s: float) -> None:
        """``record`` a reply's signature, with the minimal work that this takes between two renewals."""
        term, renewals = signature
        if not renewals:
            return
        with self._lock:
            if renewals == self._packed and term == self._term:
                if self._answers and sent_s > self._answers[-1][1] and renewals >> 32 == self._answers[-1][0]:
                    self._answers[-1] = renewals >> 32, sent_s
                return
        self.record(term, sent_s, Renewals.of(renewals))
        self._packed = renewals

    def _prove(self, sent_s: float, renewals: Renewals) -> None:
        proven = [at_s for requested, at_s in self._answers if requested < renewals.confirmed]
        if renewals.requested < renewals.confirmed:  # of an answer given after a renewal of its own
            proven.append(sent_s)
        if proven and self._ttl_s:
            self._proven = self._term, max(self._proven[1], max(proven) + self._ttl_s - MARGIN_S)
            self._answers = [answer for answer in self._answers if answer[0] >= renewals.confirmed]

    def _note(self, requested: int, sent_s: float) -> None:
        answers = self._answers
        if answers and requested == answers[-1][0]:
            if sent_s > answers[-1][1]:
                answers[-1] = (requested, sent_s)
        elif not answers or (requested > answers[-1][0] and sent_s > answers[-1][1]):
            answers.append((requested, sent_s))
            del answers[:-MAX_ANSWERS]

    def accepts(self, signature: Signature, now_s: float) -> bool:
        """Return whether to accept a reply that arrived before ``now_s``; if not, its master has to prove its lease.

        A master that was not elected, or does not count its renewals, needs no proof.
        """
        return not signature.renewals or self.is_proven(signature.term, now_s)

    def is_proven(self, term: Term, now_s: float) -> bool:
        """Return whether to accept an answer of a master of ``term`` that arrived before ``now_s``."""
        proven, until_s = self._proven
        return now_s < until_s and term == proven

    def check(self) -> None:
        """Assert the bound and the order."""
        assert len(self._answers) <= MAX_ANSWERS
        assert self._answers == sorted(self._answers)
        times = [sent_s for _, sent_s in self._answers]
        assert times == sorted(times)

    def __repr__(self) -> str:
        return f"LeaseProofs(term {self._term.number}, until {self._proven[1]:.3f})"
