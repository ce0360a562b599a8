"""Which ranges a master owns, in virtual time: never two at one time, whatever is late, lost or standing still."""

from __future__ import annotations

import pytest

from tanghulu.discovery.base import Instance
from tanghulu.store.master.election import range_election
from tanghulu.store.master.election.masters_view import (
    LEADER,
    MASTERS,
    NODES,
    KeySeen,
    MastersView,
    assign,
    range_name,
)
from tanghulu.store.master.election.range_election import (
    OTHERS_WAIT_S,
    RANGE_TRANSITIONS,
    RETRY_S,
    SETTLE_S,
    Announce,
    Apply,
    Claim,
    ClaimLead,
    Disown,
    HandOver,
    Lead,
    Own,
    RangeElection,
    RangeEvent,
    RangeInstruction,
    RangeState,
    Renew,
    Revoke,
    StepDown,
)
from tanghulu.store.protocol import terms
from tanghulu.store.protocol.key_slots import NUM_RANGES
from tanghulu.store.protocol.terms import MARGIN_S, LeaseProofs, Renewals, Term
from tanghulu.types import Address, InstanceId, Role
from tests.store.sim.masters_world import MastersWorld

TTL_S = 2.0
ALL = range(NUM_RANGES)
LEASE, B_LEASE = 5, 6
OWNERS = assign("ab")
MINE = tuple(n for n in ALL if OWNERS[n] == "a")
OTHERS = tuple(n for n in ALL if OWNERS[n] == "b")


def instance(name: str) -> Instance:
    return Instance(InstanceId(name), Role.MASTER, Address(name, 1))


def master_key(name: str, revision: int, lease: int) -> KeySeen:
    return KeySeen(MASTERS + name, revision, lease, instance=instance(name))


def range_keys(ranges: tuple[int, ...] | range, revision: int, owner: str, lease: int) -> list[KeySeen]:
    return [KeySeen(range_name(number), revision, lease, text=owner) for number in ranges]


def gone(*names: str, revision: int) -> list[KeySeen]:
    return [KeySeen(name, revision) for name in names]


def announced(now_s: float = 10.0, *others: KeySeen) -> RangeElection:
    """The election of master "a", which has a lease since ``now_s`` and claims what is vacant."""
    election = RangeElection("a", TTL_S)
    assert election.tick(now_s) == [], "nothing is known of etcd yet"
    has_leader = any(each.name == LEADER for each in others)
    leader = [] if has_leader else [KeySeen(LEADER, 19, 99, instance=instance("z"))]
    assert election.snapshot([*leader, *others], 30, now_s) == [Apply()]
    assert election.lease_granted(LEASE, now_s, now_s) == [Announce(LEASE)]
    return election


def owning(now_s: float = 10.0) -> RangeElection:
    """Master "a", alone, owns all ranges in term 40."""
    election = announced(now_s)
    assert election.seen([master_key("a", 31, LEASE)], now_s) == [Claim(LEASE, tuple(ALL))]
    election.done(Claim(LEASE, tuple(ALL)), now_s)
    assert election.seen(range_keys(ALL, 40, "a", LEASE), now_s) == [Own(number, 40) for number in ALL]
    return election


def without_renewals(instructions: list[RangeInstruction]) -> list[RangeInstruction]:
    return [each for each in instructions if not isinstance(each, Renew)]


def handing_over() -> RangeElection:
    """Master "a" has given half of its ranges up to "b", at 10.6 s."""
    election = owning()
    election.seen([master_key("b", 50, B_LEASE)], 10.0)
    assert without_renewals(election.tick(10.0 + SETTLE_S - 0.01)) == [], "another master may come or go"
    given_up = without_renewals(election.tick(10.6))
    assert given_up == [*map(Disown, OTHERS), HandOver("b", B_LEASE, tuple((n, 40) for n in OTHERS))]
    return election


# --- alone


def test_an_only_master_owns_all_ranges_while_its_lease_lives() -> None:
    election = owning()
    assert election.owned(11.69) == frozenset(ALL)
    assert election.owned(10.0 + TTL_S - MARGIN_S) == frozenset(), "counted from before it asked, with a margin"
    assert election.tick(10.4) == [Renew(LEASE, 2)]
    assert election.renewals(10.4) == (2, 1)
    assert election.renewed(Renew(LEASE, 2), 10.4, 10.5, known=True) == []
    assert election.owned(12.0) == frozenset(ALL)
    assert election.renewals(10.5) == (2, 2)
    known = election.view.map(77)
    assert (known.version, set(known.owners), set(known.terms)) == (40, {Address("a", 1)}, {40})
    election.check()


def test_what_is_claimed_is_owned_only_when_the_watch_tells() -> None:
    """Until then this master does not know which nodes were admitted before its term began."""
    election = announced()
    election.seen([master_key("a", 31, LEASE)], 10.0)
    election.done(Claim(LEASE, tuple(ALL)), 10.1)
    assert election.owned(10.1) == frozenset()
    assert election.renewals(10.1) == (1, 0), "nothing is proven of who owns nothing"
    assert election.tick(10.1) == []
    assert election.tick(10.1 + RETRY_S) == [Claim(LEASE, tuple(ALL))], "etcd takes it only if the keys are absent"


def test_a_lease_that_comes_too_late_is_given_back() -> None:
    election = RangeElection("a", TTL_S)
    assert election.snapshot([], 30, 10.0) == [Apply()]
    assert election.lease_granted(LEASE, 10.0, 10.0 + TTL_S) == [Revoke(LEASE)]
    assert election.tick(12.0) == [Apply()]
    election.apply_failed(12.5)
    assert election.tick(12.5) == []
    assert election.tick(12.5 + RETRY_S) == [Apply()]


# --- the owner's lease ends


@pytest.mark.parametrize("how", ["stood still", "lease gone", "resigned"])
def test_who_loses_its_lease_owns_nothing_and_forgets(how: str) -> None:
    election = owning()
    match how:
        case "stood still":
            told = election.tick(99.0)
        case "lease gone":
            told = election.renewed(Renew(LEASE, 2), 10.4, 10.5, known=False)
        case _:
            told = election.resign(10.5)
    assert told == [*map(Disown, ALL), Revoke(LEASE)]
    assert election.owned(10.5) == frozenset()
    assert set(election.states) == {RangeState.LOST}
    assert election.renewals(10.5).confirmed == 0 < election.renewals(10.5).packed, "0 would need no proof"
    assert election.seen([], 10.5) == []
    assert set(election.states) == {RangeState.LOST}, "the keys still name this master"
    assert election.renewed(Renew(LEASE, 2), 10.4, 99.0, known=True) == [], "an answer that comes too late"
    assert election.tick(100.0) == ([] if how == "resigned" else [Apply()])
    election.check()


def test_keys_under_a_lease_of_before_are_not_owned() -> None:
    election = owning()
    election.tick(99.0)
    election.tick(100.0)
    assert election.lease_granted(7, 100.0, 100.0) == [Announce(7)]
    assert election.seen([master_key("a", 60, 7)], 100.0) == [], "they vanish, or others take them"
    assert election.owned(100.0) == frozenset()
    vanished = gone(*map(range_name, ALL), revision=61)
    assert election.seen(vanished, 100.1) == [Claim(7, tuple(ALL))]
    election.check()


def test_the_standby_claims_at_once_and_others_a_little_later() -> None:
    """Master "a" sees the ranges of "b" vanish with it; "c", which lives, is the standby of some of them."""
    keys = [master_key("b", 20, B_LEASE), master_key("c", 21, 8), *range_keys(ALL, 22, "b", B_LEASE)]
    election = announced(10.0, *keys)
    assert election.seen([master_key("a", 31, LEASE)], 10.0) == []
    standby_of = tuple(n for n in ALL if assign("ac")[n] == "a")
    the_others = tuple(n for n in ALL if assign("ac")[n] == "c")
    vanished = gone(MASTERS + "b", *map(range_name, ALL), revision=50)
    assert election.seen(vanished, 11.0) == [Claim(LEASE, standby_of)]
    election.done(Claim(LEASE, standby_of), 11.01)
    told = election.seen(range_keys(standby_of, 51, "a", LEASE), 11.01)
    assert told == [Own(number, 51) for number in standby_of]
    assert without_renewals(election.tick(11.0 + OTHERS_WAIT_S - 0.01)) == []
    assert without_renewals(election.tick(11.0 + OTHERS_WAIT_S)) == [Claim(LEASE, the_others)]
    election.done(Claim(LEASE, the_others), 11.35)
    assert election.seen(range_keys(the_others, 52, "c", 8), 11.35) == [], "c was there in time"
    election.check()


# --- handed over


def test_a_range_is_given_up_before_its_key_is_rewritten() -> None:
    election = handing_over()
    assert election.owned(10.6) == frozenset(MINE)
    assert OTHERS[0] not in election.owned(10.6)
    assert election.seen(range_keys(OTHERS, 57, "b", B_LEASE), 10.7) == []
    assert {election.states[n] for n in OTHERS} == {RangeState.FOLLOWING}
    known = election.view.map(77)
    assert (known.version, known.owner_of(OTHERS[0]), known.term_of(OTHERS[0])) == (57, Address("b", 1), 57)
    election.check()


def test_a_hand_over_that_was_not_answered_is_tried_again_and_never_taken_back_in_that_term() -> None:
    """It may be done yet, much later: so the term that was given up is not answered for, whoever the key names."""
    election = handing_over()
    election.done(HandOver("b", B_LEASE, tuple((n, 40) for n in OTHERS)), 11.0)
    assert without_renewals(election.tick(11.05)) == []
    told = without_renewals(election.tick(11.0 + RETRY_S))
    assert told == [HandOver("b", B_LEASE, tuple((n, 40) for n in OTHERS))]
    election.seen([], 11.2)
    assert election.owned(11.2) == frozenset(MINE)
    election.check()


def test_if_the_new_owner_is_gone_the_range_is_taken_back_in_a_later_term() -> None:
    election = handing_over()
    election.renewed(Renew(LEASE, 2), 10.6, 10.6, known=True)
    election.done(HandOver("b", B_LEASE, tuple((n, 40) for n in OTHERS)), 10.6)
    to_itself = HandOver("a", LEASE, tuple((n, 40) for n in OTHERS))
    assert without_renewals(election.seen(gone(MASTERS + "b", revision=58), 11.0)) == [to_itself]
    assert election.owned(11.0) == frozenset(MINE)
    assert election.seen(range_keys(OTHERS, 59, "a", LEASE), 11.1) == [Own(number, 59) for number in OTHERS]
    assert election.owned(11.1) == frozenset(ALL)
    election.check()


def test_who_loses_its_lease_in_a_hand_over_leaves_the_range_to_the_lease() -> None:
    election = handing_over()
    assert election.tick(99.0) == [*map(Disown, MINE), Revoke(LEASE)]
    vanished = gone(MASTERS + "a", *map(range_name, ALL), revision=60)
    assert election.seen(vanished, 99.0) == []
    assert set(election.states) == {RangeState.VACANT}
    election.check()


def test_who_is_handed_a_range_owns_it_when_the_watch_tells() -> None:
    election = announced(10.0, master_key("b", 20, B_LEASE), *range_keys(ALL, 22, "b", B_LEASE))
    election.seen([master_key("a", 31, LEASE)], 10.0)
    assert election.seen(range_keys(MINE, 57, "a", LEASE), 10.5) == [Own(number, 57) for number in MINE]
    assert election.seen(range_keys((OTHERS[0],), 58, "a", 4), 10.6) == [], "a lease that it had before"
    assert election.owned(10.6) == frozenset(MINE)
    election.check()


def test_a_watch_that_is_late_or_begins_again_does_not_deceive() -> None:
    election = owning()
    leader = KeySeen(LEADER, 19, 99, instance=instance("z"))
    keys = [leader, master_key("a", 31, LEASE), *range_keys(ALL, 40, "a", LEASE)]
    assert election.snapshot(keys, 39, 10.1) == [], "older than what was seen"
    assert election.owned(10.1) == frozenset(ALL)
    assert election.seen(gone(range_name(3), revision=35), 10.1) == []
    assert election.snapshot(keys, 70, 10.2) == []
    assert election.owned(10.2) == frozenset(ALL), "nothing has changed"
    assert election.snapshot(keys[:-1], 80, 10.3)[:1] == [Disown(63)]
    election.check()


# --- the leader


def test_a_watch_that_begins_again_takes_nodes_for_no_change_of_the_map() -> None:
    known = [KeySeen(LEADER, 19, 99, instance=instance("z")), master_key("a", 31, LEASE), *range_keys(ALL, 40, "a", 5)]
    node = KeySeen(NODES + "n", 50, 0, instance=instance("n"))
    watched, begun_again, restarted = MastersView(), MastersView(), MastersView()
    for view in (watched, begun_again):
        view.begin(known[:1], 30)
        view.change(known[1:])
        view.change([node])
    begun_again.begin([*known, node], 90)
    restarted.begin([*known, node], 90)
    assert [view.map(7).version for view in (watched, begun_again, restarted)] == [40, 40, 40]
    begun_again.begin([*known[:-1], node], 95)
    assert begun_again.map(7).version == 95, "a key went unseen, at a revision that nobody tells"
    for view in (watched, begun_again, restarted):
        view.check()


def test_who_finds_no_leader_claims_its_key_and_leads_when_the_watch_tells() -> None:
    election = owning()
    assert ClaimLead(LEASE) not in election.tick(10.1), "another leads"
    assert election.seen(gone(LEADER, revision=50), 10.2) == [ClaimLead(LEASE)]
    assert election.tick(10.2) == [], "it is being written"
    assert not election.leads(10.2)
    election.done(ClaimLead(LEASE), 10.2)
    assert election.seen([KeySeen(LEADER, 51, LEASE, instance=instance("a"))], 10.2) == [Lead(51)]
    assert election.leads(10.2)
    assert not election.leads(10.0 + TTL_S - MARGIN_S), "under the same lease as the ranges"
    assert election.term == 51
    election.check()
    assert election.tick(99.0) == [StepDown(), *map(Disown, ALL), Revoke(LEASE)]
    election.check()


def test_a_leader_whose_key_is_anothers_steps_down_and_keeps_its_ranges() -> None:
    election = owning()
    election.seen([KeySeen(LEADER, 51, LEASE, instance=instance("a"))], 10.1)
    assert without_renewals(election.seen([KeySeen(LEADER, 52, B_LEASE, instance=instance("b"))], 10.2)) == [StepDown()]
    assert not election.leads(10.2)
    assert election.owned(10.2) == frozenset(ALL)
    stale = KeySeen(LEADER, 53, 4, instance=instance("a"))
    assert election.seen([stale], 10.3) == [], "under a lease that it had before"
    election.check()


def test_the_table_knows_every_key_event_in_every_state() -> None:
    keys = (RangeEvent.KEY_GONE, RangeEvent.KEY_OURS, RangeEvent.KEY_STALE, RangeEvent.KEY_OTHERS)
    assert all((state, event) in RANGE_TRANSITIONS for state in RangeState for event in keys)
    assert {*RANGE_TRANSITIONS.values()} == set(RangeState)
    assert {event for _, event in RANGE_TRANSITIONS} == set(RangeEvent)


# --- many lives


def lived(seed: int, *, only_pauses: bool = False) -> MastersWorld:
    world = MastersWorld(seed, only_pauses=only_pauses)
    world.run(20.0)
    return world


@pytest.mark.parametrize("seed", range(4))
def test_at_most_one_master_answers_for_a_range_to_whom_has_proof(seed: int) -> None:
    world = lived(seed, only_pauses=seed % 2 == 1)
    world.settle()
    assert not world.wrong, f"seed {seed}: {world.wrong[:3]}"
    assert world.counts["believed"] > 100


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_in_many_lives(seed: int) -> None:
    world = lived(1000 + seed)
    world.settle()
    assert not world.wrong, f"seed {1000 + seed}: {world.wrong[:3]}"


def test_the_lives_hold_what_they_are_to_hold_against() -> None:
    """Masters answer that own nothing any more, ranges are handed over, and callers know better."""
    counts = lived(0).counts + lived(1, only_pauses=True).counts
    for each in ("answered without being the owner", "HandOver", "refused"):
        assert counts[each] > 0, counts


def caught(seeds: range, *, only_pauses: bool = False) -> bool:
    return any(lived(seed, only_pauses=only_pauses).wrong for seed in seeds)


def test_who_answers_on_after_a_hand_over_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mutant(RangeElection):
        def owned(self, now_s: float) -> frozenset[int]:
            served = (RangeState.OWNED, RangeState.HANDING_OVER) if now_s < self._until_s else ()
            return frozenset(number for number in ALL if self.states[number] in served)

    monkeypatch.setattr(range_election, "RangeElection", Mutant)
    assert caught(range(20))


def test_who_takes_a_range_back_in_a_term_that_it_has_given_up_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mutant(RangeElection):
        def done(self, written: Announce | Claim | HandOver, now_s: float) -> None:
            super().done(written, now_s)
            if isinstance(written, HandOver):
                for number in self._in(RangeState.HANDING_OVER):
                    self.states[number], self._given_up[number] = RangeState.OWNED, 0
                self._owned = None

    monkeypatch.setattr(range_election, "RangeElection", Mutant)
    assert caught(range(20))


def test_who_tells_of_renewals_while_it_owns_nothing_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A renewal of its next lease then proves what it said in a version of the map under the lease before."""

    class Mutant(RangeElection):
        def renewals(self, now_s: float) -> Renewals:
            return Renewals(self.num_requested, self.num_confirmed)

    monkeypatch.setattr(range_election, "RangeElection", Mutant)
    assert caught(range(8, 50), only_pauses=True)


def test_a_renewal_under_way_taken_for_proof_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mutant(LeaseProofs):
        def record(self, term: Term, sent_s: float, renewals: Renewals, ttl_s: float = 0.0) -> None:
            super().record(term, sent_s, renewals._replace(confirmed=renewals.confirmed + 1), ttl_s)

    monkeypatch.setattr(terms, "LeaseProofs", Mutant)
    assert caught(range(12, 42), only_pauses=True)
