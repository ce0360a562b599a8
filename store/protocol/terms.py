"""Terms of elected masters, which of them nodes and clients still obey, and the proof that one still leads. Pure."""

from __future__ import annotations

import threading
from typing import NamedTuple


class Term(NamedTuple):
    """The ``number`` of an election, counted by the etcd with the id ``cluster``; 0: nobody was elected."""

    number: int = 0
    cluster: int = 0


NO_TERM = Term()
#: How much sooner than etcd a master, and each of its callers, takes its lease for over: clocks drift, and an answer
#: may be under way.
MARGIN_S = 0.3
#: Answers that are kept for a proof to come: of as many renewals some may be under way at one time.
MAX_ANSWERS = 8


class Renewals(NamedTuple):
    """Of a master's lease: renewals that it has ``asked`` of etcd, and up to which one etcd has ``confirmed``.

    They travel as one number; 0, of a master that was not elected, tells nothing.
    """

    asked: int = 0
    confirmed: int = 0

    @property
    def packed(self) -> int:
        """Both as one number of 64 bits."""
        return self.asked << 32 | self.confirmed

    @classmethod
    def of(cls, packed: int) -> Renewals:
        """What ``packed`` says."""
        return cls(packed >> 32, packed & 0xFFFF_FFFF)


class TermFence:
    """Which masters a process still obeys: none whose term is over.

    Each election of a master has a term, a number that only grows (the revision at which etcd wrote the leader's key).
    Who has heard of term 9 refuses what a master of term 7 says, be it ever so alive: it stood still while it was
    deposed, its clock perhaps with it, and its successor has given its word on other things since. Terms are compared
    within one etcd only, so that an etcd that is set up anew does not lose against the memory of its forerunner. A
    master that was not elected says term 0 and is obeyed: there is only one. Safe to use from several threads.
    """

    def __init__(self) -> None:
        self.newest = Term()
        self._lock = threading.Lock()

    def admits(self, number: int, cluster: int) -> bool:
        """Return whether to obey a master of term ``number``; remembers it if it is the newest."""
        if not number or self.newest == (number, cluster):
            return True
        with self._lock:
            if cluster == self.newest.cluster and number < self.newest.number:
                return False
            self.newest = Term(number, cluster)
            return True

    def is_over(self, number: int, cluster: int) -> bool:
        """Whether a term later than ``number`` is known: what such a master accepts its successor need not know."""
        return cluster == self.newest.cluster and 0 < number < self.newest.number

    def __repr__(self) -> str:
        return f"TermFence({self.newest.number} of {self.newest.cluster:x})"


class LeaseProofs:
    """Until when a caller may believe that a master still leads, by the caller's own clock.

    The clock of a virtual machine that was stopped stands still, and a leader in it believes its lease for as long as
    that had to run, while another leads. So its own word is no proof. What is proof: the answer to a call that was
    sent at T told of N renewals asked, and a later answer tells that renewal N + 1 or a later one is confirmed. That
    one was asked after T, so at T etcd still had the lease, which runs ``ttl_s`` at least from then. Who leads a term
    now has led it all the time, so an answer that came before its proof is proven by it. That some renewal is confirmed
    is not enough: it may have been under way when the call was sent, in the socket of the machine that was stopped.

    Example with ttl 3 s: a call of 10.0 s is answered "asked 41, confirmed 41", one of 10.6 s "asked 42, confirmed 42":
    answers are believed until 10.0 + 3 - 0.3 = 12.7 s. Safe to use from several threads.
    """

    def __init__(self) -> None:
        self._term = NO_TERM
        self._ttl_s = 0.0
        self._proven = NO_TERM, float("-inf")  # which, and until when; replaced in one step
        self._answers: list[tuple[int, float]] = []  # (renewals asked, when the call was sent), both growing
        self._last = Renewals()
        self._packed = 0  # the same, of a reply
        self._lock = threading.Lock()

    def record(self, term: Term, sent_s: float, renewals: Renewals, ttl_s: float = 0.0) -> None:
        """An answer of a master of ``term`` to a call that was sent at ``sent_s``; ``ttl_s``: of its lease, if told."""
        with self._lock:
            if term != self._term:
                if term.cluster == self._term.cluster and term.number < self._term.number:
                    return
                self._term, self._ttl_s, self._last, self._answers = term, 0.0, Renewals(), []
                self._proven = term, float("-inf")
            self._note(renewals.asked, sent_s)
            if renewals != self._last or ttl_s:  # else nothing is new, as between two renewals
                self._ttl_s, self._last = ttl_s or self._ttl_s, renewals
                self._prove(sent_s, renewals)

    def answered(self, term: int, term_of: int, renewals: int, sent_s: float) -> None:
        """``told`` by a reply's fields, with as little work as that takes between two renewals."""
        if not renewals:
            return
        with self._lock:
            if renewals == self._packed and term == self._term.number and term_of == self._term.cluster:
                if self._answers and sent_s > self._answers[-1][1] and renewals >> 32 == self._answers[-1][0]:
                    self._answers[-1] = renewals >> 32, sent_s
                return
        self.record(Term(term, term_of), sent_s, Renewals.of(renewals))
        self._packed = renewals

    def _prove(self, sent_s: float, renewals: Renewals) -> None:
        proven = [at_s for asked, at_s in self._answers if asked < renewals.confirmed]
        if renewals.asked < renewals.confirmed:  # of an answer that was made behind a renewal of its own
            proven.append(sent_s)
        if proven and self._ttl_s:
            self._proven = self._term, max(self._proven[1], max(proven) + self._ttl_s - MARGIN_S)
            self._answers = [answer for answer in self._answers if answer[0] >= renewals.confirmed]

    def _note(self, asked: int, sent_s: float) -> None:
        answers = self._answers
        if answers and asked == answers[-1][0]:
            if sent_s > answers[-1][1]:
                answers[-1] = (asked, sent_s)
        elif not answers or (asked > answers[-1][0] and sent_s > answers[-1][1]):
            answers.append((asked, sent_s))
            del answers[:-MAX_ANSWERS]

    def is_proven(self, term: Term, now_s: float) -> bool:
        """Return whether an answer of a master of ``term`` may be believed that came before ``now_s``."""
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
