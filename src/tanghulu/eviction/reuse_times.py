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
from collections import deque
from collections.abc import Iterator

from tanghulu.types import ChunkKey

#: Ages below this share bin 0.
_FIRST_AGE = 32
#: Bins of half an octave; the last one holds all greater ages (beyond 2 million uses).
NUM_BINS = 34
#: Old experience fades: every refit keeps this fraction. With a refit each 8,192 uses half is left after 280,000.
_KEPT_SHARE = 0.98
#: Prior of a rarely seen class: counted as if one more chunk had entered and this many had been reused.
_PRIOR_HITS = 0.01
#: Number of uses between checks of the groups' ages.
AGEING_STEP = 32
#: Keys of a class share a group if used close together: maximum uses between them, and maximum keys of a group.
_GROUP_SPAN = 32
_GROUP_KEYS = 512


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


class Group:
    """Keys of one class, used at about ``used_at``. ``queue`` is the position of its queue in the order of all."""

    __slots__ = ("class_", "keys", "queued", "used_at")

    def __init__(self, class_: int, used_at: int) -> None:
        self.class_ = class_
        self.used_at = used_at
        self.keys: dict[ChunkKey, None] = {}
        self.queued = False


class AgeQueues:
    """Keys by class and age bin, so that the key of the lowest rank is found without a search.

    Keys of one class used at about the same time form a group; a group is in the queue of its class and of the bin of
    its age, and moves from bin to bin as it ages. So the cost of ageing is per group, not per key. ``rank`` orders the
    queues; the first that holds a key gives the next victim: from its oldest group, the key that entered first.

    The caller removes keys from ``Group.keys`` itself; an empty group is dropped when met.
    """

    def __init__(self, num_classes: int) -> None:
        self._queues: list[list[deque[Group]]] = [[deque() for _ in range(NUM_BINS)] for _ in range(num_classes)]
        self._by_bin = list(zip(*self._queues, strict=True))
        self._open: list[Group | None] = [None] * num_classes
        self._order: list[deque[Group]] = []
        self._places: list[list[int]] = []
        self._first = 0  # no queue before this position in the order holds a group
        self.rank([[0.0] * NUM_BINS for _ in range(num_classes)])

    def rank(self, ranks: list[list[float]]) -> None:
        """Order the queues by ``ranks[class][bin]``; among equals the older goes first."""
        pairs = [(c, b) for c in range(len(self._queues)) for b in range(NUM_BINS)]
        pairs.sort(key=lambda pair: (ranks[pair[0]][pair[1]], -pair[1]))
        self._order = [self._queues[c][b] for c, b in pairs]
        self._places = [[0] * NUM_BINS for _ in self._queues]
        for place, (class_, index) in enumerate(pairs):
            self._places[class_][index] = place
        self._first = 0

    def group_for(self, class_: int, now: int) -> Group:
        """Return the group for keys of ``class_`` used now."""
        group = self._open[class_]
        if group is None or now - group.used_at >= _GROUP_SPAN or len(group.keys) >= _GROUP_KEYS:
            group = self._open[class_] = Group(class_, now)
        return group

    def enqueue(self, group: Group, now: int) -> None:
        """Make sure that ``group``, which got a key, is in the queue of its age."""
        if not group.queued:
            self._append(group, bin_of(now - group.used_at))

    def _append(self, group: Group, index: int) -> None:
        group.queued = True
        self._queues[group.class_][index].append(group)
        self._first = min(self._first, self._places[group.class_][index])

    def age(self, now: int) -> None:
        """Move groups whose time in a bin has ended to the next, the oldest bins first."""
        for index in range(NUM_BINS - 2, -1, -1):
            latest = now - first_age(index + 1)
            if latest < 0:
                continue
            for queue in self._by_bin[index]:
                while queue and queue[0].used_at <= latest:
                    group = queue.popleft()
                    if group.keys:
                        self._append(group, index + 1)
                    else:
                        group.queued = False

    def first(self) -> ChunkKey | None:
        """Return the key of the lowest rank; None if empty."""
        for place in range(self._first, len(self._order)):
            queue = self._order[place]
            while queue:
                if queue[0].keys:
                    self._first = place
                    return next(iter(queue[0].keys))
                queue.popleft().queued = False
        self._first = len(self._order)
        return None

    def keys(self) -> Iterator[ChunkKey]:
        """Yield all keys by rank."""
        for queue in self._order[self._first :]:
            for group in queue:
                yield from group.keys

    def check(self) -> None:
        """Assert that each group is in one queue, of its class, and none before the first position."""
        seen: set[int] = set()
        for class_, row in enumerate(self._queues):
            for group in (group for queue in row for group in queue):
                assert group.class_ == class_
                assert group.queued
                assert id(group) not in seen
                seen.add(id(group))
        assert not any(self._order[: self._first])
