"""The keys of the directory in order, for listings; kept only while there are listings. Pure.

The tables of all ranges keep their keys in many small dicts, which have no order. The first listing has them sorted
into *runs*, one per step (half a microsecond a key); a page merges the runs from its cursor on. While the runs exist,
each new or removed key is entered into its own (2 us). ``KEPT_S`` after the last listing they are dropped, in steps
too.

Why not a permanent order: it costs each key that is put, reported or evicted 2 to 3 us, half of the master's total cost
of such a key, and eight bytes; keys are listed by people and by tools.

A run is cut into leaves, like a B-tree's, of neighbouring keys. A leaf is a dict without values: sorted when it is
read, and never visited by the garbage collector, which takes 0.1 s for the lists of a million keys.

Example: parts {d, a} and {b} make one run with the leaf {a, b, d}. The new key c makes it {a, b, d, c}, and
``keys_from("b")`` gives b, c, d.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Sequence

#: Lifetime of an unused order.
KEPT_S = 60.0
#: Initial number of keys of a run: sorted in one step, 5 ms. At least one part.
RUN_KEYS = 8192
#: Keys of a leaf; one with twice this number is split.
LEAF_KEYS = 128
#: Number of leaves dropped in one step, 1 ms.
STEP_LEAVES = 128


class _Run:
    """The keys of some parts. A leaf's keys are not less than its first one, and less than the next leaf's."""

    def __init__(self, keys: list[str]) -> None:
        self.leaves = [dict.fromkeys(keys[start : start + LEAF_KEYS]) for start in range(0, len(keys), LEAF_KEYS)]
        self._firsts = keys[::LEAF_KEYS]
        if not keys:
            self.leaves.append({})
            self._firsts.append("")
        self._firsts[0] = ""

    def add(self, key: str) -> None:
        index = bisect_right(self._firsts, key) - 1
        leaf = self.leaves[index]
        leaf[key] = None
        if len(leaf) > 2 * LEAF_KEYS:
            keys = sorted(leaf)
            self.leaves[index : index + 1] = dict.fromkeys(keys[:LEAF_KEYS]), dict.fromkeys(keys[LEAF_KEYS:])
            self._firsts.insert(index + 1, keys[LEAF_KEYS])

    def remove(self, key: str) -> None:
        index = bisect_right(self._firsts, key) - 1
        leaf = self.leaves[index]
        del leaf[key]
        if not leaf and index:
            del self.leaves[index], self._firsts[index]

    def keys_from(self, first: str, *, inclusive: bool) -> Iterator[str]:
        index = bisect_right(self._firsts, first) - 1
        keys = sorted(self.leaves[index])
        yield from keys[(bisect_left if inclusive else bisect_right)(keys, first) :]
        for later in range(index + 1, len(self.leaves)):
            yield from sorted(self.leaves[later])

    def check(self) -> None:
        assert len(self.leaves) == len(self._firsts)
        assert self._firsts == sorted(set(self._firsts))
        for index, leaf in enumerate(self.leaves):
            assert len(leaf) <= 2 * LEAF_KEYS
            assert all(bisect_right(self._firsts, key) - 1 == index for key in leaf)


class KeyOrder:
    """See the module. Each key is in one of the parts; a leading number of the parts are in a run."""

    def __init__(self) -> None:
        self._parts: list[Collection[str]] = []
        self._runs: list[_Run] = []
        self._run_of: list[_Run] = []  # of each part
        self._waste: list[_Run] = []  # to be dropped, leaf by leaf
        self._asked = False
        self._until_s = 0.0

    def __bool__(self) -> bool:
        """Return whether there is any run to be kept up to date."""
        return bool(self._runs)

    def join(self, parts: Sequence[Collection[str]]) -> int:
        """Include the keys of ``parts``; return the number of the first of them."""
        self._parts += parts
        return len(self._parts) - len(parts)

    def replace(self, first: int, parts: Sequence[Collection[str]]) -> None:
        """Replace as many parts from ``first`` on by ``parts``, which are empty; the order is rebuilt."""
        self._parts[first : first + len(parts)] = parts
        self._waste, self._runs, self._run_of = self._waste + self._runs, [], []

    def extend(self) -> bool:
        """Sort one more run; return whether all keys are in one now."""
        self._asked = True
        first, keys = len(self._run_of), list[str]()
        for part in self._parts[first:]:
            if len(keys) >= RUN_KEYS:
                break
            keys += part
            first += 1
        if first > len(self._run_of):
            self._runs.append(_Run(sorted(keys)))
            self._run_of += [self._runs[-1]] * (first - len(self._run_of))
        return first == len(self._parts)

    def tick(self, now_s: float) -> None:
        """Drop the order, in steps, if it was not used recently."""
        if self._asked:
            self._asked, self._until_s = False, now_s + KEPT_S
        elif self._runs and now_s >= self._until_s:
            self._waste, self._runs, self._run_of = self._waste + self._runs, [], []
        for _ in range(STEP_LEAVES if self._waste else 0):
            if self._waste and not self._waste[-1].leaves:
                self._waste.pop()
            elif self._waste:
                self._waste[-1].leaves.pop()

    def added(self, part: int, key: str) -> None:
        """Record that ``key`` is new in ``part``."""
        if part < len(self._run_of):
            self._run_of[part].add(key)

    def removed(self, part: int, key: str) -> None:
        """Record that ``key`` is no longer in ``part``."""
        if part < len(self._run_of):
            self._run_of[part].remove(key)

    def keys_from(self, first: str, *, inclusive: bool) -> Iterator[str]:
        """Yield all keys in order from ``first`` on; valid until the next change. They are all in a run."""
        return heapq.merge(*(run.keys_from(first, inclusive=inclusive) for run in self._runs))

    def check(self) -> None:
        """Assert that the runs are sound and have the keys of their parts."""
        for run in self._runs:
            run.check()
            keys = [key for part, each in zip(self._parts, self._run_of, strict=False) if each is run for key in part]
            assert sorted(keys) == list(run.keys_from("", inclusive=True))

    def __repr__(self) -> str:
        return f"KeyOrder({len(self._run_of)} of {len(self._parts)} parts in {len(self._runs)} runs)"
