"""Adaptive busy polling: when it pays to ask again for a moment before sleeping, and the drivers that do it.

To wake a core that sleeps takes longer than a small transfer, above all on a virtual machine, where it costs a way
through the hypervisor (100 us and more were seen, for an answer of 30). A caller that keeps asking instead has its
answer at once. But the other end must be awake as well, and asking may cost time too: the peer works on the same core
(Linux likes to place a process there that another one wakes before it sleeps itself, and there a switch between the two
is cheap), other processes want the core and get it for longer later, other threads want the interpreter, or the peer is
in another town. None of that can be known in advance, so it is tried: ``PollTrial``, at the client, compares both ways.
The client says in each head whether it polls, and the owner polls for such clients only. ``PollBudget`` bounds what the
owner may spend on clients that do not come back.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

from tanghulu.runtime.clock import Clock

#: How long an owner asks for a client's next words before it sleeps: by default, and at most.
SPIN_S, MAX_SPIN_S = 100e-6, 0.01
#: Waits of one try; the first of them belong to the way of waiting before it, and are not compared.
TRY_WAITS = 32
_FIRST_WAITS = 4
#: A transfer counts as no longer than this: what takes longer has other reasons, and a few such must not decide.
LONGEST_S = 5e-4
#: Share by which polling must be shorter than sleeping: it costs a core, and less may be chance.
GAIN = 0.2
#: Waits for which a finding is kept: at first, doubled each time that it is found again, and at most.
KEPT_WAITS, KEPT_WAITS_MAX = TRY_WAITS, 64 * TRY_WAITS
#: A client polls for this multiple of ``spin_s``: its answer may have to wait until the owner has woken.
CLIENT_SPINS = 3
#: Share of the time that an owner may poll without success, and the part of a spin that a head in time earns.
INCOME, REWARD = 0.05, 0.25
#: Multiple of its ``spin_s`` that an owner saves up before it polls, and may spend without success in a row.
PURSE_SPINS = 2 * TRY_WAITS
#: Ends a spin under a clock that stands still.
_MAX_ASKS = 10_000
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


class TrialState(Enum):
    """The phases of a trial."""

    #: Waits asleep, to see how long that takes.
    SLEEPS = "sleeps"
    #: Spins, to see how long that takes.
    SPINS = "spins"
    #: Waits in the better of the two ways.
    KEEPS = "keeps"


#: The state that follows when the waits of a state are over.
TRANSITIONS = {
    TrialState.SLEEPS: TrialState.SPINS,
    TrialState.SPINS: TrialState.KEEPS,
    TrialState.KEEPS: TrialState.SLEEPS,
}


class PollTrial:
    """Decides whether the next wait polls, by comparing the time with and without; pure. For one thread at a time.

    The trial compares the whole time from one answer to the next: a peer that polls on the caller's core makes waits
    short and all else long. A caller that takes its time between transfers finds no difference, and sleeps.

    Example: 32 transfers asleep take 190 us on average, the next 32 polling 90 us. So the next 32 poll, then both are
    tried again, and if that says the same the next 64 spin, and so on up to 2,048; but should some of them take as
    long as 32 did asleep, polling ends at once. Where transfers take 100 and 96 us the caller sleeps, because 4 % are
    not worth a core. Before long the worse way is tried for 2 % of the waits.
    """

    def __init__(self, gain: float = GAIN) -> None:
        self.state = TrialState.SLEEPS
        self._share = 1 - gain
        #: Whether the next wait spins.
        self.spins = False
        self._num_left = TRY_WAITS
        self._sum_s = 0.0
        self._asleep_s = 0.0  # of the last try
        self._was_better = False  # polling, at the last try
        self._kept_waits = KEPT_WAITS

    def took(self, seconds: float) -> None:
        """Take note that a wait ended ``seconds`` after the one before it."""
        self._num_left -= 1
        left = self._num_left % TRY_WAITS
        if left < TRY_WAITS - _FIRST_WAITS:
            self._sum_s += min(seconds, LONGEST_S)
        disappoints = self.spins and not self._is_better(self._sum_s)
        if disappoints or not self._num_left:
            self._go_on()
        elif not left:
            self._sum_s = 0.0

    def check(self) -> None:
        """Assert the invariants."""
        assert 0 < self._num_left <= KEPT_WAITS_MAX
        assert self.state is TrialState.KEEPS or self.spins is (self.state is TrialState.SPINS)

    def __repr__(self) -> str:
        return f"PollTrial({self.state.value}, {'spins' if self.spins else 'sleeps'}, {self._num_left} waits left)"

    def _is_better(self, polling_s: float) -> bool:
        return polling_s < self._asleep_s * self._share

    def _go_on(self) -> None:
        took_s, self._sum_s = self._sum_s, 0.0
        before, self.state = self.state, TRANSITIONS[self.state]
        self._num_left = TRY_WAITS
        if before is TrialState.SLEEPS:
            self._asleep_s, self.spins = took_s, True
        elif before is TrialState.SPINS:
            better = self._is_better(took_s)
            self._kept_waits = min(self._kept_waits * 2, KEPT_WAITS_MAX) if better is self._was_better else KEPT_WAITS
            self.spins = self._was_better = better
            self._num_left = self._kept_waits
        else:
            self.spins = False


class PollBudget:
    """Decides whether the owner may poll once more for a client that says it polls; pure.

    Example with ``spin_s`` 100 us: the purse holds 6.4 ms. Sixty-four waits without success empty it; then 128 ms pass
    without polling, and it is full again. If four of five heads come in time, they earn what the fifth costs.
    """

    def __init__(self, spin_s: float) -> None:
        self.spin_s = spin_s
        self._purse_s = self._full_s = spin_s * PURSE_SPINS
        self._rests_until_s = 0.0
        self._counted_at_s = 0.0
        self._begun_s = 0.0

    def begin(self, now_s: float) -> bool:
        """Return whether to poll now, for ``spin_s`` at most; the caller calls ``end`` when that is over."""
        if now_s < self._rests_until_s:
            return False
        self._purse_s = min(self._purse_s + (now_s - self._counted_at_s) * INCOME, self._full_s)
        self._counted_at_s = self._begun_s = now_s
        return True

    def end(self, now_s: float, answered: bool) -> None:
        """Account for polling that is over; longer than ``spin_s`` counts as a failure, whatever took the time."""
        took_s = now_s - self._begun_s
        if answered and took_s <= self.spin_s:
            self._purse_s += self.spin_s * REWARD  # more than full is cut off when the next begins
            return
        self._purse_s -= took_s
        if self._purse_s < self.spin_s:
            self._rests_until_s = now_s + (self._full_s - self._purse_s) / INCOME

    def check(self) -> None:
        """Assert that there is something to spend while the owner may poll."""
        assert self._purse_s >= self.spin_s or self._rests_until_s > self._begun_s

    def __repr__(self) -> str:
        return f"PollBudget({self._purse_s * 1e6:.0f} us, rests until {self._rests_until_s:g} s)"


class BusyPoller:
    """Waits for the answers of a peer, for one caller at a time: polls first, where that pays.

    The caller must be awake when an owner that slept answers, or its next head would find the owner asleep again.
    ``gain`` is the share by which polling must be shorter.
    """

    def __init__(self, spin_s: float, clock: Clock, gain: float = GAIN) -> None:
        self.trial = PollTrial(gain)
        self._spin_s = spin_s * CLIENT_SPINS
        self._now_s = clock.now_s
        self._ended_s = 0.0  # the wait before

    def receive(self, call: Callable[[Any, int, int], Any], into: object) -> Any:
        """Return what ``call(into, 0, flags)``, a receiving method of a socket that may wait, gives first."""
        found = self._ask(self._now_s(), call, into) if self.trial.spins else None
        if found is None:
            found = call(into, 0, 0)
        ended_s = self._now_s()
        self.trial.took(ended_s - self._ended_s)
        self._ended_s = ended_s
        return found

    def receive_more(self, call: Callable[[Any, int, int], Any], into: object) -> Any:
        """Return what ``call`` gives without sleeping, or None."""
        return self._ask(self._now_s(), call, into) if self.trial.spins else None

    def _ask(self, now_s: float, call: Callable[[Any, int, int], Any], into: object) -> Any:
        until_s = now_s + self._spin_s
        for _ in range(_MAX_ASKS):
            try:
                return call(into, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                if self._is_over(until_s):
                    break
        return None

    def _is_over(self, until_s: float) -> bool:
        return self._now_s() >= until_s


class Waiters:
    """Counts the threads of one process that wait with pollers of their own."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self._lock = threading.Lock()

    def __enter__(self) -> int:
        """Count one more thread; returns how many wait now."""
        with self._lock:
            self.num_waiting += 1
            return self.num_waiting

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self.num_waiting -= 1


class LonePoller(BusyPoller):
    """Polls only while no other thread among ``waiters`` waits: each asking gives the interpreter to another thread."""

    def __init__(self, spin_s: float, clock: Clock, gain: float, waiters: Waiters) -> None:
        super().__init__(spin_s, clock, gain)
        self._waiters = waiters

    def receive(self, call: Callable[[Any, int, int], Any], into: object) -> Any:
        """As BusyPoller's; a wait beside other threads says nothing of what polling takes, and is not compared."""
        with self._waiters as num_waiting:
            if num_waiting == 1:
                return super().receive(call, into)
            found = call(into, 0, 0)
            self._ended_s = self._now_s()
            return found

    def _is_over(self, until_s: float) -> bool:
        return self._waiters.num_waiting > 1 or super()._is_over(until_s)


class LoopPoller:
    """Keeps an owner's event loop awake for a moment when a client's next words may come soon.

    The loop does not wait here: it goes round, and serves whatever else is ready. ``soon`` is its ``call_soon``.
    """

    def __init__(self, budget: PollBudget, clock: Clock, soon: Callable[[Callable[[], None]], object]) -> None:
        self._budget = budget
        self._now_s = clock.now_s
        self._soon = soon
        self._polling = False
        self._until_s = 0.0
        self._queued = False  # a round of ours is in the loop's queue

    def wait(self) -> None:
        """Keep the loop awake, if the budget allows it: something is waited for."""
        if self._polling or not self._budget.begin(now_s := self._now_s()):
            return
        self._polling, self._until_s = True, now_s + self._budget.spin_s
        if not self._queued:
            self._queued = True
            self._soon(self._round)

    def answered(self) -> None:
        """Let the loop sleep: what was waited for has come."""
        if self._polling:
            self._polling = False
            self._budget.end(self._now_s(), True)

    def _round(self) -> None:
        if self._polling and (now_s := self._now_s()) >= self._until_s:
            self._polling = False
            self._budget.end(now_s, False)
        self._queued = self._polling
        if self._polling:
            self._soon(self._round)


def paying_spin_s(spin_s: float) -> float:
    """Return ``spin_s`` where a second core can run the peer meanwhile, else 0."""
    return spin_s if num_cores() >= 2 else 0.0


def num_cores() -> float:
    """The cores that this process may use, by its affinity and its control group's quota."""
    return min(float(len(os.sched_getaffinity(0))), _quota_cores())


def _quota_cores() -> float:
    try:
        quota, _, period = _CPU_QUOTA.read_text().partition(" ")
        return float("inf") if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):  # not version 2, or not ours
        return float("inf")
