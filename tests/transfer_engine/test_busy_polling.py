"""When a wait spins: the trial and the budget in virtual time, the shells around them, and both ends for real."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import socket
from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tanghulu.errors import InvalidRequest
from tanghulu.masters import Masters
from tanghulu.runtime import busy_polling as spinning
from tanghulu.runtime.busy_polling import (
    CLIENT_SPINS,
    INCOME,
    KEPT_WAITS_MAX,
    PURSE_SPINS,
    REWARD,
    TRY_WAITS,
    BusyPoller,
    LonePoller,
    LoopPoller,
    PollBudget,
    PollTrial,
    TrialState,
    Waiters,
)
from tanghulu.runtime.clock import ManualClock, SystemClock
from tanghulu.store.client.logic.effects import MASTER
from tanghulu.store.client.settings import Settings
from tanghulu.transfer_engine.core.wire import Head, MalformedMessage, Op, parse_head
from tanghulu.transfer_engine.engine import EngineConfig, Opcode, TransferEngine, TransferRequest
from tests.transfer_engine.segment_process import HOST_ID, SegmentProcess, random_bytes

SPIN_S = 100e-6


# --- the trial


def wait(trial: PollTrial, asleep_s: float, spinning_s: float) -> bool:
    """One wait in the way that the trial wants; whether that was spinning."""
    spun = trial.spins
    trial.took(spinning_s if spun else asleep_s)
    trial.check()
    return spun


def runs(spun: list[bool]) -> list[tuple[bool, int]]:
    return [(each, len(list(group))) for each, group in itertools.groupby(spun)]


def test_the_better_way_is_kept_and_tried_again_more_rarely():
    """The docstring's example."""
    trial = PollTrial()
    spun = [wait(trial, 90e-6, 30e-6) for _ in range(20_000)]
    kept = [length - TRY_WAITS for spins, length in runs(spun)[:-1] if spins]
    assert kept[:8] == [32, 64, 128, 256, 512, 1024, 2048, 2048]
    assert {length for spins, length in runs(spun)[:-1] if not spins} == {TRY_WAITS}


def test_spinning_that_does_not_pay_is_left():
    for asleep_s, spinning_s in ((50e-6, 48e-6), (100e-6, 140e-6), (300e-6, 300e-6)):
        trial = PollTrial()
        spun = [wait(trial, asleep_s, spinning_s) for _ in range(20_000)]
        assert max(length for spins, length in runs(spun) if spins) <= TRY_WAITS
        assert sum(spun) < 0.04 * len(spun)


def test_a_peer_that_becomes_slow_or_quick_is_noticed():
    trial = PollTrial()
    for _ in range(20_000):
        wait(trial, 90e-6, 30e-6)
    spun = [wait(trial, 90e-6, 120e-6) for _ in range(20_000)]
    assert runs(spun)[0][1] <= 2 * TRY_WAITS
    assert sum(spun) < 0.05 * len(spun)
    spun = [wait(trial, 90e-6, 30e-6) for _ in range(20_000)]
    assert sum(spun) > 0.95 * (len(spun) - KEPT_WAITS_MAX)


def test_the_first_waits_of_a_try_are_those_before_it():
    """A peer that slept has to be woken once before it spins, too."""
    trial = PollTrial()
    for number in range(2 * TRY_WAITS):
        trial.took(0.9 if number == TRY_WAITS else 30e-6 if trial.spins else 90e-6)
    assert trial.spins


def test_a_try_ends_as_soon_as_it_cannot_pay():
    trial = PollTrial()
    spun = [wait(trial, 90e-6, 5e-3) for _ in range(1000)]
    assert max(length for spins, length in runs(spun) if spins) <= 12


def test_a_few_long_waits_do_not_decide():
    """Another machine had the core for a while."""
    trial, longs = PollTrial(), {10, TRY_WAITS + 10, TRY_WAITS + 20}
    for number in range(2 * TRY_WAITS):
        trial.took(0.02 if number in longs else 30e-6 if trial.spins else 90e-6)
    assert trial.spins


def test_a_choice_by_bad_luck_does_not_last():
    """While the waits asleep were tried something else took the core; spinning is the slower way for all that."""
    trial = PollTrial()
    for _ in range(TRY_WAITS):
        trial.took(500e-6)
    spun = [wait(trial, 90e-6, 400e-6) for _ in range(1000)]
    assert runs(spun)[0] == (True, 2 * TRY_WAITS)
    assert sum(spun) <= 4 * TRY_WAITS


@given(st.lists(st.floats(0, 10), min_size=1, max_size=3000))
def test_every_state_comes_and_ends(waits: list[float]):
    trial, states = PollTrial(), [TrialState.SLEEPS]
    for seconds in waits:
        trial.took(seconds)
        trial.check()
        if trial.state is not states[-1]:
            states.append(trial.state)
    assert all(spinning.TRANSITIONS[before] is after for before, after in itertools.pairwise(states))
    assert len(states) > 2 or len(waits) < 2 * TRY_WAITS


# --- the budget


@given(st.lists(st.tuples(st.floats(0, 0.01), st.booleans(), st.floats(0, 0.005)), max_size=200))
def test_what_is_spent_in_vain_is_bounded(waits: list[tuple[float, bool, float]]):
    """By the share of the time, by what answers earned, by the purse, and by one overrun."""
    budget, clock, vain_s, earned_s, longest_s = PollBudget(SPIN_S), ManualClock(), 0.0, 0.0, 0.0
    for idle_s, answered, took_s in waits:
        clock.advance(idle_s)
        if budget.begin(clock.now_s()):
            clock.advance(took_s)
            budget.end(clock.now_s(), answered)
            if answered and took_s <= SPIN_S:
                earned_s += REWARD * SPIN_S
            else:
                vain_s += took_s
                longest_s = max(longest_s, took_s)
        budget.check()
    assert vain_s <= INCOME * clock.now_s() + earned_s + PURSE_SPINS * SPIN_S + longest_s + 1e-9


def test_four_of_five_heads_in_time_pay_for_the_fifth():
    budget, clock = PollBudget(SPIN_S), ManualClock(5.0)
    for number in range(1000):
        assert budget.begin(clock.now_s())
        clock.advance(SPIN_S if number % 5 == 0 else 30e-6)
        budget.end(clock.now_s(), bool(number % 5))
        budget.check()


def test_clients_that_do_not_come_back_are_not_waited_for():
    """The docstring's example: 64 spins, then a rest of 128 ms."""
    budget, clock = PollBudget(SPIN_S), ManualClock(5.0)
    spun = []
    for _ in range(600):
        spun.append(budget.begin(clock.now_s()))
        clock.advance(SPIN_S)
        if spun[-1]:
            budget.end(clock.now_s(), False)
        clock.advance(0.9e-3)
    (_, first), (_, rest), *_ = runs(spun)
    assert PURSE_SPINS <= first <= 2.1 * PURSE_SPINS
    assert rest == pytest.approx(128, abs=4)


# --- a thread


class Answers:
    """A receiving method that has nothing for some times, and takes 10 us each; if it may sleep 400 us."""

    def __init__(self, clock: ManualClock, num_empty: int) -> None:
        self.clock, self.num_left, self.num_asked = clock, num_empty, 0

    def __call__(self, into: object, number: int, flags: int) -> object:
        assert number == 0
        self.clock.advance(10e-6 if flags else 400e-6)
        self.num_asked += 1
        if self.num_left and flags == socket.MSG_DONTWAIT:
            self.num_left -= 1
            raise BlockingIOError
        return into


def poller_that_spins(clock: ManualClock) -> BusyPoller:
    poller = BusyPoller(SPIN_S, clock)
    while not poller.trial.spins:
        poller.trial.took(500e-6)
    return poller


def test_a_thread_asks_until_the_answer_is_there():
    clock = ManualClock()
    poller, answers = poller_that_spins(clock), Answers(clock, 5)
    assert poller.receive(answers, "into") == "into"
    assert answers.num_asked == 6


def test_a_thread_sleeps_when_it_has_asked_for_long_enough():
    clock = ManualClock()
    poller, answers = poller_that_spins(clock), Answers(clock, 1 << 30)
    assert poller.receive(answers, "into") == "into"
    assert answers.num_asked == 10 * CLIENT_SPINS + 1
    assert poller.receive_more(answers, "into") is None


def test_a_thread_that_does_not_spin_sleeps_at_once():
    clock = ManualClock()
    poller, answers = BusyPoller(SPIN_S, clock), Answers(clock, 0)
    assert poller.receive(answers, "into") == "into"
    assert answers.num_asked == 1
    assert poller.receive_more(answers, "into") is None


def test_a_thread_finds_out_by_itself():
    clock = ManualClock()
    poller = BusyPoller(SPIN_S, clock)
    for _ in range(2 * TRY_WAITS):
        poller.receive(Answers(clock, 2), "into")
    assert poller.trial.spins
    assert poller.trial.state is TrialState.KEEPS


def test_a_clock_that_stands_still_ends_it():
    def never(into: object, number: int, flags: int) -> str:
        if flags:
            raise BlockingIOError
        return "slept"

    assert poller_that_spins(ManualClock()).receive(never, "into") == "slept"


def test_in_company_a_thread_sleeps_and_learns_nothing():
    clock, company = ManualClock(), Waiters()
    poller = LonePoller(SPIN_S, clock, 0.1, company)
    for _ in range(2 * TRY_WAITS):
        poller.receive(Answers(clock, 2), "into")
    assert poller.trial.spins
    before = repr(poller.trial)
    with company:
        answers = Answers(clock, 0)
        assert poller.receive(answers, "into") == "into"
        assert answers.num_asked == 1
    assert repr(poller.trial) == before
    asked = Answers(clock, 2)
    assert poller.receive(asked, "into") == "into"
    assert asked.num_asked == 3
    assert company.num_waiting == 0


def test_who_spins_sleeps_when_company_comes():
    clock, company = ManualClock(), Waiters()
    poller = LonePoller(SPIN_S, clock, 0.1, company)
    while not poller.trial.spins:
        poller.trial.took(500e-6)

    def joined(into: object, number: int, flags: int) -> str:
        company.__enter__()
        if flags:
            raise BlockingIOError
        return "slept"

    assert poller.receive(joined, "into") == "slept"
    assert company.num_waiting == 2, "one asking, one sleep"


def test_a_client_may_be_told_not_to():
    settings = Settings(master=Masters.of("host:1"))
    assert (settings.poller_for(MASTER, Waiters()) is None) == (spinning.num_cores() < 2)
    assert settings.poller_for("node", Waiters()) is None
    assert dataclasses.replace(settings, spin_s=0.0).poller_for(MASTER, Waiters()) is None
    for seconds in (-1e-6, 1.0, float("nan")):
        with pytest.raises(InvalidRequest, match="spin_s"):
            dataclasses.replace(settings, spin_s=seconds)


# --- an event loop


class Loop:
    """Goes round as often as it is told; one round takes 10 us."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.queue: deque[Callable[[], None]] = deque()
        self.poller = LoopPoller(PollBudget(SPIN_S), self.clock, self.queue.append)

    def go_round(self) -> bool:
        """Whether there was something to do, so that it did not sleep."""
        awake = bool(self.queue)
        for _ in range(len(self.queue)):
            self.queue.popleft()()
        self.clock.advance(10e-6)
        return awake


def test_a_loop_stays_awake_for_a_moment():
    loop = Loop()
    assert not loop.go_round()
    loop.poller.wait()
    assert sum(loop.go_round() for _ in range(50)) == 11


def test_a_loop_stays_awake_while_messages_come():
    loop = Loop()
    loop.poller.wait()
    for _ in range(200):
        assert all(loop.go_round() for _ in range(5))
        loop.poller.answered()
        loop.poller.wait()
        assert len(loop.queue) == 1, "one round of ours at a time"
    loop.poller.answered()
    assert sum(loop.go_round() for _ in range(5)) == 1


def test_messages_that_come_late_let_it_sleep():
    loop = Loop()
    slept = 0
    for _ in range(200):
        loop.poller.wait()
        slept += sum(not loop.go_round() for _ in range(100))
        loop.poller.answered()
    assert slept > 0.9 * 200 * 100


async def test_a_real_loop_serves_others_meanwhile():
    loop = asyncio.get_running_loop()
    poller = LoopPoller(PollBudget(5.0), SystemClock(), loop.call_soon)
    poller.wait()
    await asyncio.sleep(0.01)
    for _ in range(100):
        await asyncio.sleep(0)
    assert await asyncio.to_thread(lambda: 7) == 7
    poller.answered()


# --- both ends


@given(st.booleans(), st.booleans())
def test_a_head_says_whether_the_client_is_awake(verified: bool, awake: bool):
    head = Head(Op.READ, 1, 2, 3, 4, 5, 6, verified, 7, awake)
    assert parse_head(head.pack()) == head


def test_flags_that_nobody_knows_are_malformed():
    packed = bytearray(Head(Op.READ, 1, 2, 3, 4, 5, 6).pack())
    packed[6] = 4
    with pytest.raises(MalformedMessage):
        parse_head(packed)


@pytest.mark.parametrize("spin_s", [0.0, 0.05])
@pytest.mark.parametrize("length", [1, 100_000, 1 << 20])
def test_transfers_with_and_without(spin_s: float, length: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(spinning, "num_cores", lambda: 2.0)
    payload = random_bytes(length, 3)
    with (
        SegmentProcess(size_bytes=1 << 20, spin_s=spin_s) as owner,
        TransferEngine(host_id=HOST_ID, config=EngineConfig(spin_s=spin_s)) as engine,
    ):
        remote = engine.open_segment(owner.descriptor, transport="tcp")
        assert (remote.poller is not None) is (spin_s > 0)
        num_spun = 0
        for number in range(TRY_WAITS + 3):
            landing = bytearray(length)
            engine.transfer([TransferRequest(Opcode.WRITE, payload, remote, 0, length)], 10)
            engine.transfer([TransferRequest(Opcode.READ, landing, remote, 0, length)], 10)
            num_spun += remote.poller is not None and remote.poller.trial.spins
            assert landing == payload.tobytes(), number
        assert (num_spun > 0) is (spin_s > 0)
        engine.check()


def test_nobody_spins_on_one_core(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setattr(spinning.os, "sched_getaffinity", lambda _: {3})
    assert spinning.paying_spin_s(SPIN_S) == 0
    monkeypatch.setattr(spinning.os, "sched_getaffinity", lambda _: {3, 4, 5, 6})
    for quota, cores in (("max 100000", 4.0), ("150000 100000", 1.5), ("garbage", 4.0)):
        (tmp_path / "cpu.max").write_text(quota)
        monkeypatch.setattr(spinning, "_CPU_QUOTA", tmp_path / "cpu.max")
        assert spinning.num_cores() == cores
    monkeypatch.setattr(spinning, "_CPU_QUOTA", tmp_path / "none")
    assert spinning.paying_spin_s(SPIN_S) == SPIN_S
