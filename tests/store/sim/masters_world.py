"""Masters that share the ranges in a modelled etcd, and callers that believe them only with proof; all by a seed.

What goes wrong: calls to etcd are late, lost before or behind it, or done long after their caller has given them up;
watches are late, or break and begin again with all keys; masters stand still with and without their clock, are killed,
resign, and come back; etcd is gone for a while.

What must hold: a master whose clock never stood still owns a range only while etcd says so, and no answer is believed
that was made by a master which was not the range's owner then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

from tanghulu.discovery.base import Instance
from tanghulu.store.master.election import range_election
from tanghulu.store.master.election.masters_view import LEADER, MASTERS, RANGE_NUMBERS, KeySeen, assign, range_name
from tanghulu.store.master.election.range_election import (
    Announce,
    Apply,
    Claim,
    ClaimLead,
    Disown,
    HandOver,
    Lead,
    Own,
    RangeInstruction,
    Renew,
    Revoke,
    StepDown,
)
from tanghulu.store.protocol import terms
from tanghulu.store.protocol.key_slots import NUM_RANGES
from tanghulu.store.protocol.range_map import RangeMap
from tanghulu.store.protocol.terms import Renewals, Term
from tanghulu.types import Address, InstanceId, Role
from tests.store.sim.etcd_model import EtcdModel, NoSuchLeaseError

TTL_S = 2.0
STEP_S = 0.02
CALL_S = 1.0
CLUSTER = 77
CHECK_STEPS = 10
#: The ranges that are asked for.
CALLED = range(0, NUM_RANGES, 8)


class MasterProcess:
    """One run of a master: its election, its clock, and how far its watch has told it."""

    def __init__(self, index: int) -> None:
        self.id = f"master-{index}"
        self.instance = Instance(InstanceId(self.id), Role.MASTER, Address("m", 1000 + index))
        self.election = range_election.RangeElection(self.id, TTL_S)
        self.behind_s = 0.0  # for so long its clock has stood still
        self.asleep_until_s = 0.0
        self.keeps_time = True  # while it is asleep
        self.is_alive = True
        self.watched = -1  # changes that its watch has told; -1: it begins with all keys
        self.watch_until_s = 0.0  # held back until then
        self.proving: list[tuple[int, Callable[[], None]]] = []


class Caller:
    """A client: its map, and the proofs that it has of each master."""

    def __init__(self) -> None:
        self.map: RangeMap | None = None
        self.proofs: dict[Address, terms.LeaseProofs] = {}

    def proofs_of(self, master: MasterProcess) -> terms.LeaseProofs:
        return self.proofs.setdefault(master.instance.address, terms.LeaseProofs())


class MastersWorld:
    """Some masters and callers, and an etcd."""

    def __init__(self, seed: int, *, only_pauses: bool = False) -> None:
        self.rng = Random(seed)
        self.now_s, self.num_steps = 0.0, 0
        self.etcd = EtcdModel()
        self.etcd_gone_until_s = 0.0
        self.is_calm = False
        #: How much of each kind of fault there is in this life.
        self.pauses, self.kills, self.outages, self.lags = (self.rng.choice((0.0, 0.3, 1.0, 3.0)) for _ in range(4))
        self.is_slow = only_pauses or self.rng.random() < 0.3
        if only_pauses:
            self.pauses, self.kills, self.outages, self.lags = 2.0, 0.0, 0.0, 0.0
        self.masters = [MasterProcess(index) for index in range(self.rng.randint(1, 4))]
        self.back_s = [0.0] * len(self.masters)  # a master that was killed comes back then
        self.callers = [Caller() for _ in range(3)]
        self.events: list[tuple[float, MasterProcess | None, Callable[[], None]]] = []
        self.terms = [0] * NUM_RANGES
        self.lead_term = 0
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    # --- messages

    def late_s(self) -> float:
        if self.is_calm:
            return 0.01
        return (
            self.rng.uniform(0.0, 0.5) if self.is_slow else self.rng.choice((0.001, 0.05, self.rng.uniform(0.0, 1.5)))
        )

    def later(self, do: Callable[[], None], at: MasterProcess | None = None, late_s: float | None = None) -> None:
        self.events.append((self.now_s + (self.late_s() if late_s is None else late_s), at, do))

    def ask_etcd(self, master: MasterProcess, do: Callable[[], Callable[[], None]], failed: Callable[[], None]) -> None:
        """``do`` is done at etcd, and what it returns at the master; or ``failed`` is, once, when time is up."""
        answered = [False]

        def once(what: Callable[[], None]) -> None:
            if not answered[0]:
                answered[0] = True
                what()

        def arrives() -> None:
            if self.now_s < self.etcd_gone_until_s:
                self.later(arrives, late_s=self.etcd_gone_until_s - self.now_s + 0.01)
                return
            answer = do()
            if self.is_calm or self.rng.random() > 0.05:
                self.later(lambda: once(answer), master)

        if self.is_calm or self.rng.random() > 0.05:
            self.later(arrives)
        self.later(lambda: once(failed), master, CALL_S)

    # --- a master's instructions

    def perform(self, master: MasterProcess, instructions: list[RangeInstruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Apply():
                    self.apply(master)
                case Renew():
                    self.renew(master, instruction)
                case Revoke(lease):
                    self.ask_etcd(master, lambda lease=lease: self.revoke(lease), lambda: None)
                case Announce(lease):
                    key = KeySeen(MASTERS + master.id, 0, lease, instance=master.instance)
                    self.write(master, instruction, [({}, [key])])
                case Claim(lease, ranges):
                    names = map(range_name, ranges)
                    writes = [({name: 0}, [KeySeen(name, 0, lease, text=master.id)]) for name in names]
                    self.write(master, instruction, writes)
                case HandOver(owner, lease, of):
                    named = [(range_name(number), term) for number, term in of]
                    writes = [({name: term}, [KeySeen(name, 0, lease, text=owner)]) for name, term in named]
                    self.write(master, instruction, writes)
                case Own(number, term):
                    self.counts["owned"] += 1
                    assert term > self.terms[number], f"range {number} in term {term} after {self.terms[number]}"
                    self.terms[number] = term
                case ClaimLead(lease):
                    key = KeySeen(LEADER, 0, lease, instance=master.instance)
                    self.write(master, instruction, [({LEADER: 0}, [key])])
                case Lead(term):
                    self.counts["led"] += 1
                    assert term > self.lead_term, f"a leader of term {term} after {self.lead_term}"
                    self.lead_term = term
                case Disown() | StepDown():
                    pass

    def apply(self, master: MasterProcess) -> None:
        asked_s = self.clock_s(master)

        def grant() -> Callable[[], None]:
            lease = self.etcd.grant(TTL_S, self.now_s)
            election = master.election
            return lambda: self.perform(master, election.lease_granted(lease, asked_s, self.clock_s(master)))

        self.ask_etcd(master, grant, lambda: master.election.apply_failed(self.clock_s(master)))

    def renew(self, master: MasterProcess, renewal: Renew) -> None:
        asked_s = self.clock_s(master)

        def keep_alive() -> Callable[[], None]:
            known = self.etcd.keep_alive(renewal.lease, self.now_s)
            return lambda: self.renewed(master, renewal, asked_s, known=known)

        self.ask_etcd(master, keep_alive, lambda: None)

    def renewed(self, master: MasterProcess, renewal: Renew, asked_s: float, *, known: bool) -> None:
        self.perform(master, master.election.renewed(renewal, asked_s, self.clock_s(master), known=known))
        waiting, master.proving = master.proving, []
        for number, answer in waiting:
            if master.election.num_confirmed > number:
                answer()
            else:
                master.proving.append((number, answer))

    def revoke(self, lease: int) -> Callable[[], None]:
        self.etcd.revoke(lease)
        return lambda: None

    def write(
        self,
        master: MasterProcess,
        written: Announce | Claim | ClaimLead | HandOver,
        writes: list[tuple[dict[str, int], list[KeySeen]]],
    ) -> None:
        def transact() -> Callable[[], None]:
            for guards, puts in writes:
                try:
                    self.counts[type(written).__name__] += self.etcd.transact(guards, puts)
                except NoSuchLeaseError:
                    self.counts["written under a lease that was over"] += 1
            return done

        def done() -> None:
            master.election.done(written, self.clock_s(master))

        self.ask_etcd(master, transact, done)

    def watch(self, master: MasterProcess) -> None:
        if self.now_s < max(master.watch_until_s, self.etcd_gone_until_s):
            return
        if not self.is_calm and self.rng.random() < 0.02 * self.lags:
            master.watch_until_s = self.now_s + self.rng.uniform(0.0, 2 * TTL_S)
            if self.rng.random() < 0.3:
                master.watched = -1
            return
        clock_s, etcd, election = self.clock_s(master), self.etcd, master.election
        if master.watched < 0:
            self.perform(master, election.snapshot(list(etcd.keys.values()), etcd.revision, clock_s))
        elif master.watched < len(etcd.history):
            self.perform(master, election.seen(etcd.history[master.watched :], clock_s))
        master.watched = len(etcd.history)

    # --- calls

    def call(self, caller: Caller, number: int) -> None:
        known = caller.map
        address = known.owner_of(number) if known is not None else None
        awake = [each for each in self.masters if each.is_alive]
        if not awake:
            return
        master = next((each for each in awake if each.instance.address == address), self.rng.choice(awake))
        sent_s = self.now_s

        def handle() -> None:
            clock_s, election = self.clock_s(master), master.election
            told = election.view.map(CLUSTER)
            if number not in election.owned(clock_s):
                self.later(lambda: self.heard_map(caller, told))
                return
            is_owner = self.is_owner(master, number)
            self.counts["answered without being the owner"] += not is_owner
            renewals = election.renewals(clock_s)

            def answer() -> None:
                caller.proofs_of(master).record(Term(told.version, CLUSTER), sent_s, renewals)
                self.heard(caller, master, number, told.version, is_owner, sent_s)

            self.later(answer)

        self.later(handle, master)

    def heard_map(self, caller: Caller, told: RangeMap) -> None:
        if told.replaces(caller.map):
            caller.map = told

    def heard(
        self, caller: Caller, master: MasterProcess, number: int, version: int, is_owner: bool, sent_s: float
    ) -> None:
        """An answer came that was made at ``version``: it is believed with proof, and else when a proof comes."""
        known = caller.map
        if known is None or known.owner_of(number) != master.instance.address or known.term_of(number) > version:
            self.counts["refused"] += 1
            told = master.election.view.map(CLUSTER)
            self.later(lambda: self.heard_map(caller, told), master)
            return
        if caller.proofs_of(master).is_proven(Term(version, CLUSTER), self.now_s):
            self.counts["believed"] += 1
            if not is_owner:
                self.wrong.append(f"{self.now_s:.2f}: {master.id} for range {number} at {version}, sent {sent_s:.2f}")
            return
        if sent_s < self.now_s - CALL_S:
            self.counts["given up"] += 1
            return
        self.prove(caller, master, lambda: self.heard(caller, master, number, version, is_owner, sent_s))

    def prove(self, caller: Caller, master: MasterProcess, then: Callable[[], None]) -> None:
        sent_s = self.now_s

        def handle() -> None:
            election = master.election
            before = election.num_requested
            master.proving.append((before, lambda: answer(before)))
            self.perform(master, election.renew(self.clock_s(master)))

        def answer(before: int) -> None:
            election = master.election
            told = election.renewals(self.clock_s(master))
            if told.confirmed:
                term = Term(election.view.map(CLUSTER).version, CLUSTER)
                self.later(lambda: heard(term, Renewals(before, told.confirmed)))

        def heard(term: Term, told: Renewals) -> None:
            caller.proofs_of(master).record(term, sent_s, told, TTL_S)
            then()

        self.later(handle, master)

    def is_owner(self, master: MasterProcess, number: int) -> bool:
        key = self.etcd.keys.get(range_name(number))
        return key is not None and key.text == master.id

    # --- time

    def clock_s(self, master: MasterProcess) -> float:
        return self.now_s - master.behind_s

    def is_asleep(self, master: MasterProcess) -> bool:
        return self.now_s < master.asleep_until_s

    def disturb(self) -> None:
        rng = self.rng
        for index, master in enumerate(self.masters):
            if not master.is_alive:
                if self.now_s >= self.back_s[index]:
                    self.masters[index] = MasterProcess(index)
            elif rng.random() < 0.002 * self.pauses:
                master.asleep_until_s = self.now_s + rng.uniform(0.0, 3 * TTL_S)
                master.keeps_time = rng.random() < 0.5
                master.watch_until_s = master.asleep_until_s + rng.uniform(0.0, 1.0)
            elif rng.random() < 0.001 * self.kills:
                if rng.random() < 0.5:
                    self.perform(master, master.election.resign(self.clock_s(master)))
                master.is_alive = False
                self.back_s[index] = self.now_s + rng.uniform(0.0, 2 * TTL_S)
        if rng.random() < 0.0005 * self.outages:
            self.etcd_gone_until_s = self.now_s + rng.uniform(0.0, 2 * TTL_S)

    def step(self) -> None:
        self.now_s += STEP_S
        if self.now_s < self.etcd_gone_until_s:
            self.etcd.stood_still(STEP_S)
        else:
            self.etcd.tick(self.now_s)
        if not self.is_calm:
            self.disturb()
        events, self.events = self.events, []
        due = []
        for each in events:
            is_due = each[0] <= self.now_s and (each[1] is None or not self.is_asleep(each[1]))
            (due if is_due else self.events).append(each)
        for _, master, do in due:
            if master is None or master.is_alive:
                do()
        for master in self.masters:
            if self.is_asleep(master):
                master.behind_s += 0.0 if master.keeps_time else STEP_S
            elif master.is_alive:
                self.watch(master)
                self.perform(master, master.election.tick(self.clock_s(master)))
        for caller in self.callers:
            if self.rng.random() < 0.2:
                self.call(caller, self.rng.choice(CALLED))
        self.check()

    def check(self) -> None:
        """Whose clock never stood still owns only what etcd says: so no two of them own one range."""
        self.num_steps += 1
        if self.num_steps % CHECK_STEPS == 0:
            self.etcd.check()
            for master in self.masters:
                master.election.check()
        for master in self.masters:
            if master.is_alive and not master.behind_s:
                for number in master.election.owned(self.now_s):
                    if not self.is_owner(master, number):
                        self.wrong.append(f"{self.now_s:.2f}: {master.id} owns range {number} without its key")
                leader = self.etcd.keys.get(LEADER)
                if master.election.leads(self.now_s) and (leader is None or leader.instance != master.instance):
                    self.wrong.append(f"{self.now_s:.2f}: {master.id} leads without the leader's key")

    def run(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.step()

    def settle(self) -> None:
        """Nothing is disturbed any more: soon each range is owned by who should own it, and its answers believed."""
        self.is_calm = True
        for index, master in enumerate(self.masters):
            if not master.is_alive:
                self.masters[index] = MasterProcess(index)
        self.run(6 * TTL_S)
        assert self.owners() == assign(each.id for each in self.masters)
        assert sum(each.election.leads(self.clock_s(each)) for each in self.masters) == 1
        before = self.counts["believed"]
        self.run(TTL_S)
        assert self.counts["believed"] > before

    def owners(self) -> tuple[str, ...]:
        """Of each range the masters that own it now."""
        owned = [(each.id, each.election.owned(self.clock_s(each))) for each in self.masters if each.is_alive]
        return tuple(" and ".join(name for name, ranges in owned if n in ranges) for n in RANGE_NUMBERS.values())
