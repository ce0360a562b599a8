"""What a caller believes of a leader whose clock may stand still: never more than etcd's lease allows."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from tanghulu.store.master.election.election import Apply, Election, KeyHolder, Renew
from tanghulu.store.protocol import terms
from tanghulu.store.protocol.terms import MARGIN_S, MAX_ANSWERS, NO_TERM, LeaseProofs, Renewals, Term

TTL_S = 3.0
SEVEN, NINE = Term(7, 77), Term(9, 77)


def proofs(ttl_s: float = TTL_S) -> LeaseProofs:
    """Those of a caller that has been told the length of the lease, and has no proof."""
    made = LeaseProofs()
    made.told(SEVEN, 0.0, Renewals(1, 1), ttl_s)
    return made


def test_renewals_travel_as_one_number() -> None:
    assert Renewals.of(Renewals(42, 41).packed) == (42, 41)
    assert Renewals.of(0) == Renewals() == (0, 0)
    assert Renewals((1 << 32) - 1, (1 << 32) - 1).packed == (1 << 64) - 1


def test_an_answer_is_proven_by_a_renewal_that_was_asked_for_behind_it() -> None:
    known = LeaseProofs()
    known.told(SEVEN, 10.0, Renewals(41, 41), TTL_S)
    assert not known.is_proven(SEVEN, 10.1), "first contact: its own word is no proof"
    known.told(SEVEN, 10.6, Renewals(42, 42))
    assert known.is_proven(SEVEN, 12.69)
    assert not known.is_proven(SEVEN, 12.7), "counted from when the call was sent, with a margin"
    assert not known.is_proven(NINE, 11.0)
    known.check()


def test_a_renewal_that_was_under_way_proves_nothing() -> None:
    known = proofs()
    known.told(SEVEN, 10.0, Renewals(42, 41))
    known.told(SEVEN, 10.4, Renewals(42, 42))
    assert known.is_proven(SEVEN, MARGIN_S)
    assert not known.is_proven(SEVEN, 10.5), "etcd may have taken number 42 long before 10.0"
    known.told(SEVEN, 10.6, Renewals(43, 43))
    assert known.is_proven(SEVEN, 10.4 + TTL_S - MARGIN_S - 0.01)


def test_after_a_silence_there_is_no_proof_until_it_is_asked_for() -> None:
    known = proofs()
    known.told(SEVEN, 10.0, Renewals(41, 41))
    known.told(SEVEN, 10.6, Renewals(42, 42))
    known.told(SEVEN, 90.0, Renewals(43, 43))
    assert not known.is_proven(SEVEN, 90.1), "43 may have been confirmed a minute ago"
    known.told(SEVEN, 90.1, Renewals(43, 44), TTL_S)  # the answer to PROVE: 44 was asked for behind it
    assert known.is_proven(SEVEN, 92.7)


def test_a_new_term_begins_without_a_proof_and_an_old_one_ends_none() -> None:
    known = proofs()
    known.told(SEVEN, 10.0, Renewals(1, 2), TTL_S)
    known.told(NINE, 10.1, Renewals(5, 5))
    assert not known.is_proven(NINE, 10.2)
    known.told(NINE, 10.2, Renewals(5, 6), TTL_S)
    known.told(SEVEN, 10.3, Renewals(7, 8), TTL_S)
    assert known.is_proven(NINE, 10.4)
    assert not known.is_proven(SEVEN, 10.4)
    assert not known.is_proven(NO_TERM, 10.4)


def test_what_is_kept_is_bounded() -> None:
    known = proofs()
    for number in range(100):
        known.told(SEVEN, float(number), Renewals(number + 2, 1))
        known.check()
    assert len(known._answers) == MAX_ANSWERS


# --- an etcd, a leader in a machine that is stopped with its clock, and callers; every message late


class World:
    """Times are etcd's and the callers'; the leader's own clock is behind by as long as its machine stood still."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.now_s = 0.0
        self.behind_s = self.asleep_until_s = 0.0
        self.lease_until_s = TTL_S
        self.events: list[tuple[float, bool, Callable[[], None]]] = []  # when; whether at the leader; what
        self.proving: list[tuple[int, Callable[[], None]]] = []
        self.election = Election(TTL_S)
        self.election.seen(None, 1)
        assert self.election.tick(0.0) == [Apply()]
        self.election.lease_granted(5, 0.0)
        self.election.campaigned(KeyHolder("me:1", 7), 7, won=True, now_s=0.0)
        self.callers = [terms.LeaseProofs() for _ in range(4)]
        self.num_believed = self.num_wrong = 0

    @property
    def clock_s(self) -> float:
        return self.now_s - self.behind_s

    def later(self, do: Callable[[], None], *, at_leader: bool = False) -> None:
        late_s = self.rng.choice((0.001, 0.01, 0.1, self.rng.uniform(0.0, 1.5)))
        self.events.append((self.now_s + late_s, at_leader, do))

    def perform(self, instructions: list[object]) -> None:
        for each in instructions:
            if isinstance(each, Renew):
                self.later(lambda renewal=each, asked_s=self.clock_s: self.renew(renewal, asked_s))

    def renew(self, renewal: Renew, asked_s: float) -> None:
        known = self.now_s < self.lease_until_s
        if known:
            self.lease_until_s = self.now_s + TTL_S
        self.later(lambda: self.renewed(renewal, asked_s, known), at_leader=True)

    def renewed(self, renewal: Renew, asked_s: float, known: bool) -> None:
        self.perform(list(self.election.renewed(renewal, asked_s, known=known)))
        waiting, self.proving = self.proving, []
        for number, answer in waiting:
            if self.election.num_confirmed > number:
                answer()
            else:
                self.proving.append((number, answer))

    def call(self, caller: LeaseProofs, *, prove: bool = False) -> None:
        sent_s = self.now_s

        def handle() -> None:
            if not self.election.leads(self.clock_s):
                return
            asked = self.election.num_asked
            if not prove:
                answer(None)
                return
            self.proving.append((asked, lambda: answer(asked)))
            self.perform(list(self.election.renew(self.clock_s)))

        def answer(asked_before: int | None) -> None:
            if self.election.leads(self.clock_s):
                told = Renewals(self.election.num_asked, self.election.num_confirmed)
                self.later(lambda: heard(told if asked_before is None else told._replace(asked=asked_before)))

        def heard(told: Renewals) -> None:
            caller.told(SEVEN, sent_s, told, TTL_S if prove else 0.0)
            caller.check()
            if caller.is_proven(SEVEN, self.now_s):
                self.num_believed += 1
                self.num_wrong += self.now_s >= self.lease_until_s
            elif not prove:
                self.call(caller, prove=True)

        self.later(handle, at_leader=True)

    def step(self) -> None:
        self.now_s += 0.01
        asleep = self.now_s < self.asleep_until_s
        if asleep:
            self.behind_s += 0.01
        due = [each for each in self.events if each[0] <= self.now_s and not (each[1] and asleep)]
        self.events = [each for each in self.events if each not in due]
        for _, _, do in due:
            do()
        if not asleep:
            self.perform(list(self.election.tick(self.clock_s)))
            if self.rng.random() < 0.002:
                self.asleep_until_s = self.now_s + self.rng.uniform(0.0, 2 * TTL_S)
        for caller in self.callers:
            if self.rng.random() < 0.03:
                self.call(caller)


def lived(seed: int) -> World:
    world = World(seed)
    for _ in range(1500):
        world.step()
    return world


@pytest.mark.parametrize("seed", range(25))
def test_nothing_is_believed_that_etcds_lease_does_not_cover(seed: int) -> None:
    assert lived(seed).num_wrong == 0


def test_callers_are_answered_and_believe() -> None:
    assert sum(lived(seed).num_believed for seed in range(5)) > 100


def test_a_renewal_under_way_taken_for_proof_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mutant(LeaseProofs):
        def told(self, term: Term, sent_s: float, renewals: Renewals, ttl_s: float = 0.0) -> None:
            super().told(term, sent_s, renewals._replace(confirmed=renewals.confirmed + 1), ttl_s)

    monkeypatch.setattr(terms, "LeaseProofs", Mutant)
    assert any(lived(seed).num_wrong for seed in range(25))
