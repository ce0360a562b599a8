"""Choice of the fastest number of threads for small steps, learnt from the steps taken. Pure.

A step of a few tokens is some two hundred short products. Threads that meet after each of them may cost more than they
gain, depending on what else runs on the machine: on two cores with sleeping threads one was faster than two for
decoding, on dedicated cores with spinning threads it is not. So it is measured. Steps are sorted by the number of their
tokens (1, 2 to 3, 4 to 7, ...; those of more than ``MOST_TOKENS`` always take all threads), and each size continues
with the count that was best recently. Now and then a trial takes the next smaller or larger count (1, 2, 4, ... and
all) for `SAMPLES` steps. More threads are kept if the median step was faster by a tenth, fewer if it was slower by no
more than that: others can use the cores. A failed trial doubles the wait for the next one, and one that can no longer
succeed ends early.

Worked example, 2 threads at most: 5 steps of one token take 50 ms each. The trial with one thread takes 41, 44, 40, 90
and 42 ms: its median is 42, so one thread is chosen. A later trial with two takes 51, 49 and 50 ms: three of five are
not faster by a tenth, so it ends.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

#: Most tokens of a step; larger ones always take all threads.
MOST_TOKENS = 63
#: Steps of a trial, and of the preceding ones with which it is compared.
SAMPLES = 5
#: Steps between two trials of one size, from the second on: at first, and at most.
FIRST_WAIT, LONGEST_WAIT = 16, 1024
#: More threads must be faster than fewer by this factor.
GAIN = 0.9


class _Size:
    """Measurements of the steps of one size."""

    def __init__(self, counts: Sequence[int]) -> None:
        self._counts = counts
        self.best = counts[-1]
        self.trial: int | None = None
        self._usual: deque[float] = deque(maxlen=SAMPLES)
        self._tried: list[float] = []
        self._interval, self._wait = FIRST_WAIT, SAMPLES
        self._upwards = False

    def took(self, seconds: float) -> None:
        if self.trial is not None:
            self._tried.append(seconds)
            self._judge(self.trial)
            return
        self._usual.append(seconds)
        self._wait -= 1
        if self._wait <= 0 and len(self._usual) == SAMPLES:
            self.trial = self._neighbour()

    def _neighbour(self) -> int:
        """Return the next count below or above, in turn, if there is one."""
        at = self._counts.index(self.best)
        self._upwards = not self._upwards if 0 < at < len(self._counts) - 1 else at == 0
        return self._counts[at + 1 if self._upwards else at - 1]

    def _judge(self, trial: int) -> None:
        bar = statistics.median(self._usual) * (GAIN if trial > self.best else 1 / GAIN)
        num_lost = sum(seconds > bar for seconds in self._tried)
        if num_lost <= SAMPLES // 2 and len(self._tried) < SAMPLES:
            return
        won = num_lost <= SAMPLES // 2
        if won:
            self.best = trial
            self._usual.extend(self._tried)
        self._interval = FIRST_WAIT if won else min(2 * self._interval, LONGEST_WAIT)
        self._wait, self.trial, self._tried = self._interval, None, []


class ThreadChoice:
    """Learns the best number of threads: call `threads` before a step, and `took` after it."""

    def __init__(self, most: int) -> None:
        """Start with at least one and at most ``most`` threads."""
        assert most >= 1
        self._most = most
        self._counts = [1 << shift for shift in range(most.bit_length()) if 1 << shift < most] + [most]
        self._sizes: dict[int, _Size] = {}

    def threads(self, num_tokens: int) -> int:
        """Return the number of threads for the next step, of ``num_tokens`` tokens."""
        if num_tokens > MOST_TOKENS or self._most == 1:
            return self._most
        size = self._size(num_tokens)
        return size.trial or size.best

    def took(self, num_tokens: int, seconds: float) -> None:
        if num_tokens <= MOST_TOKENS and self._most > 1:
            self._size(num_tokens).took(seconds)

    def _size(self, num_tokens: int) -> _Size:
        return self._sizes.setdefault(num_tokens.bit_length(), _Size(self._counts))

    @property
    def best(self) -> dict[int, int]:
        """Threads by the least number of tokens of each size seen."""
        return {1 << (bits - 1): size.best for bits, size in sorted(self._sizes.items())}

    def check(self) -> None:
        for size in self._sizes.values():
            assert size.best in self._counts
            assert size.trial is None or (size.trial in self._counts and size.trial != size.best)
