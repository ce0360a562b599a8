"""Ask again and again for a moment before sleeping: when it pays, and the two shells that do it.

To wake a core that sleeps takes longer than a small transfer, above all on a virtual one, where it costs a way through
the hypervisor (100 us and more were seen, for an answer that takes 30). Who keeps asking instead has the answer at once
and pays with CPU time. ``SpinBudget`` decides, from times alone: asking in vain is paid from a small income, and who is
answered in time goes on. So a waiting thread learns by itself whether its peer answers quickly, and whatever makes
asking harmful ends it: a slow peer, a network between, a thread that holds the interpreter or a process that wants the
core, because the time that the asking thread loses to them counts as spent in vain.

An answer in time proves nothing if the peer works on the same core: then it had to wait for the asking to end. Linux
likes to put it there, because whoever sends to a sleeping process mostly sleeps next itself; and there a switch between
the two is cheap. So only peers on other cores are asked (``NeighbourCore``), and only their answers count.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tanghulu.clock import Clock

#: Share of the time that may be spent in vain.
INCOME = 0.05
#: What an answer in time earns, of one ``spin_s``: it spares the thread being put to sleep and woken.
REWARD = 0.25
#: So many times ``spin_s`` are saved up before spinning begins, and may be spent in vain in a row.
PURSE_SPINS = 16
#: Ends a spin under a clock that stands still.
_MAX_ASKS = 10_000
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_LIBC = ctypes.PyDLL(None)
_getsockopt = _LIBC.getsockopt
_getsockopt.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_own_core: Callable[[], int] = _LIBC.sched_getcpu


class SpinBudget:
    """Whether the next wait may spin, and how long; pure. For one waiting thread at a time.

    Example with ``spin_s`` 100 us: the purse holds 1.6 ms. Sixteen waits in vain empty it; then 32 ms pass
    without spinning, and it is full again. If the peer takes 1 ms for each answer, that is 16 spins in 48 ms. If four
    of five are answered in time, they earn what the fifth costs, and spinning goes on for ever.
    """

    def __init__(self, spin_s: float) -> None:
        self.spin_s = spin_s
        self._purse_s = self._full_s = spin_s * PURSE_SPINS
        self._resting = spin_s <= 0
        self._counted_at_s = 0.0
        self._begun_s = 0.0

    def resting(self, now_s: float) -> bool:
        """Whether spinning did not pay, so that it is left for a while."""
        purse_s = self._purse_s + (now_s - self._counted_at_s) * INCOME
        self._purse_s = min(purse_s, self._full_s)
        self._counted_at_s = now_s
        if self._resting and self.spin_s > 0:
            self._resting = self._purse_s < self._full_s
        return self._resting

    def begin(self, now_s: float) -> None:
        """A wait begins that spins, for ``spin_s`` at most; ``end`` comes when that is over. Only while not resting."""
        assert not self._resting, "the purse is empty"
        self._begun_s = now_s

    def end(self, now_s: float, answered: bool) -> None:
        """The spin that began last is over; an answer that took longer than ``spin_s`` is none."""
        took_s = now_s - self._begun_s
        if answered and took_s <= self.spin_s:
            self._purse_s += self.spin_s * REWARD  # more than full is cut off at the next look
            return
        self._purse_s -= took_s
        self._resting = self._purse_s < self.spin_s

    def check(self) -> None:
        """Assert the invariants: while it may spin there is something to spend."""
        assert self._resting or self._purse_s >= self.spin_s > 0

    def __repr__(self) -> str:
        return f"SpinBudget({self._purse_s * 1e6:.0f} us{', resting' if self._resting else ''})"


class NeighbourCore:
    """Where the other end of a TCP connection on this machine works, for one thread at a time.

    The kernel notes at each socket the core on which its last packet came in; on loopback that is the sender's.
    """

    def __init__(self, fd: int) -> None:
        self._core, self._size = ctypes.c_int(-1), ctypes.c_uint32(ctypes.sizeof(ctypes.c_int))
        option = int(socket.SO_INCOMING_CPU)
        self._ask = (fd, socket.SOL_SOCKET, option, ctypes.addressof(self._core), ctypes.addressof(self._size))

    def apart(self) -> bool:
        """Whether the last that came was sent from another core than this thread is on now."""
        return _getsockopt(*self._ask) == 0 and self._core.value != _own_core()


class Spinner:
    """A thread's wait for what a call of the kernel gives."""

    def __init__(self, budget: SpinBudget, clock: Clock) -> None:
        self._budget = budget
        self._now_s = clock.now_s

    def ask(self, apart: Callable[[], bool], call: Callable[..., Any], *arguments: Any) -> Any:
        """``call(*arguments)``, as often as the budget lets it raise BlockingIOError; None when that is over.

        Other errors are the caller's. ``call`` must not wait, and must not give None. ``apart`` says whether the peer
        works on another core.
        """
        budget, clock = self._budget, self._now_s
        if budget.resting(now_s := clock()) or not apart():
            return None
        budget.begin(now_s)
        until_s, found = now_s + budget.spin_s, None
        try:
            for _ in range(_MAX_ASKS):
                try:
                    found = call(*arguments)
                    return found
                except BlockingIOError:
                    if clock() >= until_s:
                        return None
            return None
        finally:
            budget.end(clock(), found is not None and apart())


class LoopSpinner:
    """Keeps an event loop awake for a moment when a peer's next message may come soon.

    The loop does not wait here: it goes round, and serves whatever else is ready. ``soon`` is its ``call_soon``.
    """

    def __init__(self, budget: SpinBudget, clock: Clock, soon: Callable[[Callable[[], None]], object]) -> None:
        self._budget = budget
        self._now_s = clock.now_s
        self._soon = soon
        self._spinning = False
        self._until_s = 0.0
        self._queued = False  # a round of ours is in the loop's queue

    def wait(self, core: NeighbourCore) -> None:
        """Something is waited for, from a peer that works there."""
        if self._spinning or self._budget.resting(now_s := self._now_s()) or not core.apart():
            return
        self._budget.begin(now_s)
        self._spinning, self._until_s = True, now_s + self._budget.spin_s
        if not self._queued:
            self._queued = True
            self._soon(self._round)

    def answered(self, core: NeighbourCore) -> None:
        """Something has come."""
        if self._spinning:
            self._spinning = False
            self._budget.end(self._now_s(), core.apart())

    def _round(self) -> None:
        if self._spinning and (now_s := self._now_s()) >= self._until_s:
            self._spinning = False
            self._budget.end(now_s, False)
        self._queued = self._spinning
        if self._spinning:
            self._soon(self._round)


def paying_spin_s(spin_s: float) -> float:
    """``spin_s`` where a second core runs the peer meanwhile, else 0."""
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
