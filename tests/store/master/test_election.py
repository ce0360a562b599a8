"""The election's decisions, in virtual time: one leader at any moment, whatever is late or lost."""

from __future__ import annotations

import itertools
from random import Random

import pytest

from tanghulu.store.master.election.election import (
    MARGIN_S,
    RETRY_S,
    TRANSITIONS,
    Apply,
    Campaign,
    Election,
    ElectionState,
    Instruction,
    KeyHolder,
    Lead,
    Renew,
    Revoke,
    StepDown,
)

TTL_S = 3.0


def leading(term: int = 7, asked_s: float = 10.0) -> Election:
    election = Election(TTL_S)
    assert election.seen(None, 1) == []
    assert election.tick(asked_s) == [Apply()]
    assert election.lease_granted(5, asked_s) == [Campaign(5)]
    assert election.campaigned(KeyHolder("me:1", term), term, won=True, now_s=asked_s + 0.2) == [Lead(term)]
    return election


def test_a_vacant_key_is_campaigned_for_and_kept() -> None:
    election = leading()
    assert (election.leader, election.term) == ("me:1", 7)
    assert election.seen(KeyHolder("me:1", 7), 7) == [], "its own key"
    assert election.leads(12.69)
    assert not election.leads(12.7), "counted from before it asked, with a margin"
    assert election.tick(10.5) == [Renew(5, 2)], "the grant was the first"
    assert election.tick(10.51) == [], "one renewal at a time"
    assert election.renewed(Renew(5, 2), 10.5, known=True) == []
    assert election.leads(13.19)
    assert (election.num_asked, election.num_confirmed) == (2, 2)
    assert election.renew(10.9) == [Renew(5, 3)], "for a caller that wants a proof"
    assert (election.num_asked, election.num_confirmed) == (3, 2)
    assert election.tick(11.0) == [], "so the next is due later"
    election.check()


def test_a_leader_that_stood_still_steps_down_by_its_own_clock() -> None:
    election = leading()
    assert election.tick(99.0) == [StepDown(), Revoke(5)]
    assert election.state is ElectionState.FOLLOWING, "its key may still be there; etcd tells when it goes"
    assert election.renewed(Renew(5, 2), 10.5, known=True) == [], "an answer that comes too late changes nothing"
    assert election.seen(None, 9) == []
    assert election.tick(99.0 + RETRY_S) == [Apply()]


@pytest.mark.parametrize("how", ["taken", "deleted", "lease gone", "outranked"])
def test_what_deposes_a_leader(how: str) -> None:
    election = leading()
    match how:
        case "taken":
            instructions = election.seen(KeyHolder("other:1", 9), 9)
        case "deleted":
            instructions = election.seen(None, 9)
        case "lease gone":
            instructions = election.renewed(Renew(5, 2), 10.5, known=False)
        case _:
            assert election.outranked(7, 10.5) == [], "its own term is no news"
            instructions = election.outranked(8, 10.5)
    assert instructions == [StepDown(), Revoke(5)]
    assert not election.leads(10.6)
    assert election.leader == ("other:1" if how == "taken" else "")
    election.check()


def test_a_lost_campaign_gives_the_lease_back_and_follows() -> None:
    election = Election(TTL_S)
    election.seen(None, 1)
    election.tick(0.0)
    election.lease_granted(5, 0.0)
    assert election.campaigned(KeyHolder("other:1", 3), 4, won=False, now_s=0.1) == [Revoke(5)]
    assert (election.state, election.leader) == (ElectionState.FOLLOWING, "other:1")


def test_a_winner_that_is_gone_before_the_answer_is_not_followed_for_ever() -> None:
    election = Election(TTL_S)
    election.seen(None, 1)
    election.tick(0.0)
    election.lease_granted(5, 0.0)
    assert election.seen(None, 6) == [], "the watch is ahead of the answer"
    assert election.campaigned(KeyHolder("other:1", 3), 4, won=False, now_s=0.1) == [Revoke(5)]
    assert election.state is ElectionState.VACANT
    assert election.tick(0.1) == [Apply()]


def test_an_answer_that_does_not_come_gives_the_lease_back() -> None:
    election = Election(TTL_S)
    election.seen(None, 1)
    election.tick(0.0)
    election.lease_granted(5, 0.0)
    assert election.failed(1.0) == [Revoke(5)]
    assert election.campaigned(KeyHolder("me:1", 3), 3, won=True, now_s=1.1) == [], "it was given up"
    assert election.tick(1.0) == []
    assert election.tick(1.0 + RETRY_S) == [Apply()]


def test_a_campaign_won_too_late_is_no_win() -> None:
    election = Election(TTL_S)
    election.seen(None, 1)
    election.tick(0.0)
    election.lease_granted(5, 0.0)
    late_s = TTL_S - MARGIN_S
    assert election.campaigned(KeyHolder("me:1", 3), 3, won=True, now_s=late_s) == [Revoke(5)]


def test_who_resigns_campaigns_no_more() -> None:
    election = leading()
    assert election.resign() == [StepDown(), Revoke(5)]
    assert election.seen(None, 9) == []
    assert election.tick(50.0) == []
    assert election.state is ElectionState.RESIGNED


def test_the_table_leaves_every_state_and_enters_every_state() -> None:
    assert {state for state, _ in TRANSITIONS} == set(ElectionState)
    assert {*TRANSITIONS.values()} == set(ElectionState)


class World:
    """An etcd with one key, and masters whose calls are late, lost or answered twice over; each may stand still."""

    def __init__(self, seed: int, num_masters: int = 3) -> None:
        self.rng = Random(seed)
        self.now_s = 0.0
        self.revision = 1
        self.key: KeyHolder | None = None
        self.key_lease = 0
        self.leases: dict[int, float] = {}
        self.numbers = itertools.count(1)
        self.masters = [Election(TTL_S) for _ in range(num_masters)]
        self.asleep_until_s = [0.0] * num_masters
        self.inbox: list[list[tuple[float, object]]] = [[] for _ in range(num_masters)]
        self.terms: list[int] = []
        for index in range(num_masters):
            self.deliver(index, lambda m: m.seen(None, 1))

    def deliver(self, index: int, answer: object) -> None:
        self.inbox[index].append((self.now_s + self.rng.expovariate(20.0), answer))

    def set_key(self, holder: KeyHolder | None, lease: int) -> None:
        self.revision += 1
        revision = self.revision
        self.key, self.key_lease = holder if holder is None else KeyHolder(holder.address, revision), lease
        for index in range(len(self.masters)):
            self.deliver(index, lambda m, key=self.key: m.seen(key, revision))

    def drop(self, lease: int) -> None:
        self.leases.pop(lease, None)
        if self.key is not None and self.key_lease == lease:
            self.set_key(None, 0)

    def perform(self, index: int, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            self.obey(index, instruction, lost=self.rng.random() < 0.1)

    def obey(self, index: int, instruction: Instruction, *, lost: bool) -> None:
        asked_s = self.now_s
        match instruction:
            case Apply():
                lease = next(self.numbers)
                self.leases[lease] = self.now_s + TTL_S
                self.answer(index, lambda m: m.lease_granted(lease, asked_s), lost=lost)
            case Campaign(lease):
                won = self.key is None and lease in self.leases
                if won:
                    self.set_key(KeyHolder(f"m:{index}", 0), lease)
                holder, revision = self.key or KeyHolder("gone:1", self.revision), self.revision
                self.answer(index, lambda m: m.campaigned(holder, revision, won=won, now_s=self.now_s), lost=lost)
            case Renew(lease) as renewal if not lost:
                known = lease in self.leases
                if known:
                    self.leases[lease] = self.now_s + TTL_S
                self.deliver(index, lambda m: m.renewed(renewal, asked_s, known=known))
            case Revoke(lease) if not lost:
                self.drop(lease)
            case Lead(term):
                self.terms.append(term)

    def answer(self, index: int, answer: object, *, lost: bool) -> None:
        self.deliver(index, (lambda m: m.failed(self.now_s)) if lost else answer)

    def step(self) -> None:
        self.now_s += 0.02
        for lease in [lease for lease, until_s in self.leases.items() if until_s <= self.now_s]:
            self.drop(lease)
        for index, master in enumerate(self.masters):
            if self.rng.random() < 0.001:
                self.asleep_until_s[index] = self.now_s + self.rng.uniform(0.0, 3 * TTL_S)
            if self.now_s < self.asleep_until_s[index]:
                continue
            due = [item for item in self.inbox[index] if item[0] <= self.now_s]
            self.inbox[index] = [item for item in self.inbox[index] if item[0] > self.now_s]
            for _, answer in due:
                self.perform(index, answer(master))  # type: ignore[operator]
            self.perform(index, master.tick(self.now_s))
            master.check()
        leaders = [m for m in self.masters if m.leads(self.now_s)]
        assert len(leaders) <= 1, leaders
        if leaders:
            assert self.key is not None, "who leads holds the key"
            assert leaders[0].term == self.key.term


@pytest.mark.parametrize("seed", range(6))
def test_there_is_never_more_than_one_leader_and_soon_always_one(seed: int) -> None:
    world = World(seed)
    without_s = longest_s = 0.0
    for _ in range(6000):
        world.step()
        awake = [s <= world.now_s for s in world.asleep_until_s]
        led = any(m.leads(world.now_s) for m in world.masters)
        without_s = 0.0 if led or sum(awake) < 2 else without_s + 0.02
        longest_s = max(longest_s, without_s)
    assert world.terms == sorted(set(world.terms)), "terms only grow"
    assert len(world.terms) > 1
    assert longest_s < TTL_S + 3.0, f"seed {seed}: nobody led for {longest_s:.1f} s"
