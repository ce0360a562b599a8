"""Reuse times: learns the ages at which chunks of each class are reused, and ranks the classes at any age.

Ages are counted in adds and touches since the last use. Their bins are half octaves. For each class (what is known of a
chunk when it is used) there is the number of chunks that entered it and a histogram of the ages at which they were used
again. Both determine the rank of a chunk of this class at some age: the maximum, over all horizons, of

    P(used again within the horizon) / E[time until then, or until the horizon's end]

that is, hits per slot and time if it is kept for the best horizon: Gittins' index, as Beckmann and Sanchez use
reuse times for eviction (HPCA'17), and with request classes as in "KVCache Cache in the Wild" (USENIX ATC'25).

Example: 100 chunks entered a class, 50 were reused at age 1,000 and none later. At age 0 a chunk is worth 50 hits for
100 x 1,000 steps: 1/2,000. At age 900 it is worth 50 for 100 x 100: 1/200, and so ranks higher than when it was young.
At age 1,100 it is worth nothing.
"""

from __future__ import annotations

from bisect import bisect_right

#: Ages below this share bin 0.
_FIRST_AGE = 32
#: Bins of half an octave; the last one holds all greater ages (beyond 2 million uses).
NUM_BINS = 34
#: Old experience fades: every refit keeps this fraction. With a refit each 8,192 uses half is left after 280,000.
_KEPT_SHARE = 0.98
#: Prior of a rarely seen class: counted as if one more chunk had entered and this many had been reused.
_PRIOR_HITS = 0.01


def first_age(index: int) -> int:
    """Return the lowest age in bin ``index``; two bins for each doubling."""
    if index == 0:
        return 0
    whole = _FIRST_AGE << ((index - 1) // 2)
    return whole if index % 2 else whole * 3 // 2


_FIRST_AGES = [first_age(index) for index in range(NUM_BINS)]


def bin_of(age: int) -> int:
    """Return the bin that holds ``age``."""
    return bisect_right(_FIRST_AGES, age) - 1


class ReuseTimes:
    """Histograms for ``num_classes`` classes. ``ranks[c][b]`` is the value of a chunk of class c in bin b."""

    def __init__(self, num_classes: int) -> None:
        self._entered = [0.0] * num_classes
        self._reused = [[0.0] * NUM_BINS for _ in range(num_classes)]
        self.ranks = [[1.0] * NUM_BINS for _ in range(num_classes)]
        self._widths = [(first_age(b + 2) - first_age(b)) / 2 for b in range(NUM_BINS)]

    def entered(self, class_: int, count: int) -> None:
        """Count chunks that were used and belong to ``class_`` from now on."""
        self._entered[class_] += count

    def reused(self, class_: int, age: int) -> None:
        """Count a chunk of ``class_`` that was used again at ``age``, resident or not."""
        self._reused[class_][bisect_right(_FIRST_AGES, age) - 1] += 1  # bin_of; called for each block of a prompt

    def fit(self) -> None:
        """Recompute ``ranks``, and let old experience fade."""
        for class_, entered in enumerate(self._entered):
            if not entered:
                continue
            reused = self._reused[class_]
            self.ranks[class_] = self._ranks_of(max(entered, sum(reused)), reused)
            self._entered[class_] = entered * _KEPT_SHARE
            self._reused[class_] = [count * _KEPT_SHARE for count in reused]

    def _ranks_of(self, entered: float, reused: list[float]) -> list[float]:
        ranks = []
        alive = entered + 1.0
        for start in range(NUM_BINS):
            ranks.append(self._best_rate(alive, reused, start))
            alive -= reused[start]
        return ranks

    def _best_rate(self, alive: float, reused: list[float], start: int) -> float:
        """Return hits per slot and step from bin ``start`` on, for the best horizon; bin middles stand for ages."""
        best = time_held = 0.0
        hits = _PRIOR_HITS
        for index in range(start, NUM_BINS - 1):
            hits += reused[index]
            time_held += alive * self._widths[index]
            alive -= reused[index]
            if hits > best * time_held:
                best = hits / time_held
        return best

    def check(self) -> None:
        """Assert that nothing is negative."""
        assert min(self._entered) >= 0
        assert all(min(row) >= 0 for row in (*self._reused, *self.ranks))
