"""When a wait may spin: the budget in virtual time, the two shells around it, and both ends of a real connection."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from segment_process import HOST_ID, SegmentProcess, random_bytes

from tanghulu.clock import ManualClock, SystemClock
from tanghulu.transfer_engine import spinning
from tanghulu.transfer_engine.engine import EngineConfig, Opcode, TransferEngine, TransferRequest
from tanghulu.transfer_engine.spinning import (
    INCOME,
    PURSE_SPINS,
    REWARD,
    LoopSpinner,
    NeighbourCore,
    SpinBudget,
    Spinner,
)

SPIN_S = 100e-6


def spend(budget: SpinBudget, clock: ManualClock, wait_s: float) -> bool:
    """One wait whose answer takes so long; whether it was spun for."""
    allowed = not budget.resting(clock.now_s())
    if allowed:
        budget.begin(clock.now_s())
    clock.advance(min(wait_s, SPIN_S) if allowed else wait_s)
    if allowed:
        budget.end(clock.now_s(), wait_s <= SPIN_S)
        clock.advance(max(0.0, wait_s - SPIN_S))
    budget.check()
    return allowed


def test_it_goes_on_for_ever_with_a_quick_peer():
    budget, clock = SpinBudget(SPIN_S), ManualClock(5.0)
    assert all(spend(budget, clock, 30e-6) for _ in range(1000))


def test_four_of_five_answers_in_time_pay_for_the_fifth():
    budget, clock = SpinBudget(SPIN_S), ManualClock(5.0)
    assert all(spend(budget, clock, 0.01 if number % 5 == 0 else 30e-6) for number in range(1000))


def test_a_slow_peer_is_asked_a_few_times_and_then_rarely():
    """The docstring's example: 16 spins of 100 us in 48 ms."""
    budget, clock = SpinBudget(SPIN_S), ManualClock(5.0)
    spun = [spend(budget, clock, 1e-3) for _ in range(1000)]
    first = spun.index(False)
    assert PURSE_SPINS <= first <= PURSE_SPINS * 2
    again = spun.index(True, first)
    rest_s = PURSE_SPINS * SPIN_S / INCOME
    assert (again - first) * 1e-3 == pytest.approx(rest_s, rel=0.1)
    assert sum(spun) * SPIN_S <= 1.0 * INCOME + PURSE_SPINS * SPIN_S + 1e-9


def test_time_that_others_take_from_the_spinning_thread_counts():
    """A thread that is put off its core for 4 ms, or waits so long for the interpreter, leaves spinning for 80 ms."""
    budget, clock = SpinBudget(SPIN_S), ManualClock(5.0)
    assert not budget.resting(clock.now_s())
    budget.begin(clock.now_s())
    clock.advance(4e-3)
    budget.end(clock.now_s(), answered=True)
    assert budget.resting(clock.now_s())
    clock.advance(0.07)
    assert budget.resting(clock.now_s())
    clock.advance(0.02)
    assert not budget.resting(clock.now_s())


@pytest.mark.parametrize("spin_s", [0.0, -1.0])
def test_without_a_time_there_is_no_spinning(spin_s: float):
    budget = SpinBudget(spin_s)
    assert budget.resting(0.0)
    assert budget.resting(1e9)


@given(st.lists(st.tuples(st.floats(0, 0.01), st.booleans(), st.floats(0, 0.005)), max_size=200))
def test_what_is_spent_in_vain_is_bounded(waits: list[tuple[float, bool, float]]):
    """By the share of the time, by what answers earned, by the purse, and by one overrun."""
    budget, clock, vain_s, earned_s = SpinBudget(SPIN_S), ManualClock(), 0.0, 0.0
    longest_s = 0.0
    for idle_s, answered, took_s in waits:
        clock.advance(idle_s)
        if not budget.resting(clock.now_s()):
            budget.begin(clock.now_s())
            clock.advance(took_s)
            budget.end(clock.now_s(), answered)
            if answered and took_s <= SPIN_S:
                earned_s += REWARD * SPIN_S
            else:
                vain_s += took_s
                longest_s = max(longest_s, took_s)
        budget.check()
    assert vain_s <= INCOME * clock.now_s() + earned_s + PURSE_SPINS * SPIN_S + longest_s + 1e-9


# --- a thread


def apart() -> bool:
    return True


class Answers:
    """A call that has nothing for some times, and takes 10 us each."""

    def __init__(self, clock: ManualClock, num_empty: int) -> None:
        self.clock, self.num_left, self.num_asked = clock, num_empty, 0

    def __call__(self, *arguments: object) -> object:
        self.clock.advance(10e-6)
        self.num_asked += 1
        if self.num_left:
            self.num_left -= 1
            raise BlockingIOError
        return arguments


def test_a_thread_asks_until_the_answer_is_there():
    clock = ManualClock()
    answers = Answers(clock, 5)
    assert Spinner(SpinBudget(SPIN_S), clock).ask(apart, answers, "into", 0) == ("into", 0)
    assert answers.num_asked == 6


def test_a_thread_gives_up_in_time_and_then_does_not_ask_at_all():
    clock = ManualClock()
    spinner, answers = Spinner(SpinBudget(SPIN_S), clock), Answers(clock, 1 << 30)
    assert spinner.ask(apart, answers) is None
    assert answers.num_asked == 10
    for _ in range(PURSE_SPINS):
        assert spinner.ask(apart, answers) is None
    asked = answers.num_asked
    assert spinner.ask(apart, answers) is None
    assert answers.num_asked == asked


def test_a_peer_on_the_same_core_is_not_asked():
    clock = ManualClock()
    answers = Answers(clock, 0)
    assert Spinner(SpinBudget(SPIN_S), clock).ask(lambda: False, answers) is None
    assert answers.num_asked == 0


def test_an_answer_from_the_same_core_counts_as_none():
    clock, budget = ManualClock(), SpinBudget(SPIN_S)
    spinner = Spinner(budget, clock)
    where = itertools.cycle([True, False])
    asked = sum(spinner.ask(lambda: next(where), Answers(clock, 8)) is not None for _ in range(100))
    assert PURSE_SPINS <= asked < 2 * PURSE_SPINS


def test_a_clock_that_stands_still_ends_it():
    def never(*_: object) -> None:
        raise BlockingIOError

    assert Spinner(SpinBudget(SPIN_S), ManualClock()).ask(apart, never) is None


def test_other_errors_are_the_callers_and_the_budget_stays_whole():
    clock, budget = ManualClock(), SpinBudget(SPIN_S)

    def broken() -> None:
        clock.advance(SPIN_S)
        raise ConnectionResetError

    spinner = Spinner(budget, clock)
    for _ in range(PURSE_SPINS):
        with pytest.raises(ConnectionResetError):
            spinner.ask(apart, broken)
        budget.check()


# --- an event loop


class Core(NeighbourCore):
    """Where a peer is said to work."""

    def __init__(self) -> None:
        self.is_apart = True

    def apart(self) -> bool:
        return self.is_apart


class Loop:
    """Goes round as often as it is told; one round takes 10 us."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.queue: deque[Callable[[], None]] = deque()
        self.spinner = LoopSpinner(SpinBudget(SPIN_S), self.clock, self.queue.append)
        self.core = Core()

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
    loop.spinner.wait(loop.core)
    assert sum(loop.go_round() for _ in range(50)) == 11


def test_a_loop_stays_awake_while_messages_come():
    loop = Loop()
    loop.spinner.wait(loop.core)
    for _ in range(200):
        assert all(loop.go_round() for _ in range(5))
        loop.spinner.answered(loop.core)
        loop.spinner.wait(loop.core)
        assert len(loop.queue) == 1, "one round of ours at a time"
    loop.spinner.answered(loop.core)
    assert sum(loop.go_round() for _ in range(5)) == 1


def test_messages_that_come_late_let_it_sleep():
    loop = Loop()
    slept = 0
    for _ in range(100):
        loop.spinner.wait(loop.core)
        slept += sum(not loop.go_round() for _ in range(100))
        loop.spinner.answered(loop.core)
    assert slept > 0.9 * 100 * 100


def test_a_loop_sleeps_where_its_peer_needs_the_core():
    loop = Loop()
    loop.core.is_apart = False
    loop.spinner.wait(loop.core)
    assert not loop.go_round()


def test_the_core_of_the_other_end():
    """Pinned threads: the kernel says where the last packet came from."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    with theirs, ours:
        neighbour = NeighbourCore(ours.fileno())
        try:
            for core in cores[:2]:
                os.sched_setaffinity(0, {core})
                theirs.sendall(b"x")
                assert ours.recv(1) == b"x"
                assert not neighbour.apart()
            os.sched_setaffinity(0, {cores[0]})
            assert neighbour.apart()
        finally:
            os.sched_setaffinity(0, cores)
    assert not NeighbourCore(-1).apart(), "a connection that is closed"


async def test_a_real_loop_serves_others_meanwhile():
    loop = asyncio.get_running_loop()
    spinner = LoopSpinner(SpinBudget(5.0), SystemClock(), loop.call_soon)
    core = Core()
    spinner.wait(core)
    await asyncio.sleep(0.01)
    for _ in range(100):
        await asyncio.sleep(0)
    assert await asyncio.to_thread(lambda: 7) == 7
    spinner.answered(core)


# --- both ends


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
        assert (remote.spinner is not None) is (spin_s > 0)
        for _ in range(3):
            landing = bytearray(length)
            engine.transfer([TransferRequest(Opcode.WRITE, payload, remote, 0, length)], 10)
            engine.transfer([TransferRequest(Opcode.READ, landing, remote, 0, length)], 10)
            assert landing == payload.tobytes()
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
