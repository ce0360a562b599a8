"""Keys by class and age bin, so that the key of the lowest rank is found without a search.

Keys of one class used at about the same time form a group; a group is in the queue of its class and of the bin of its
age, and moves from bin to bin as it ages. So the cost of ageing is per group, not per key. ``rank`` orders the queues;
the first that holds a key gives the next victim: from its oldest group, the key that entered first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from tanghulu.eviction.reuse_times import NUM_BINS, bin_of, first_age
from tanghulu.types import ChunkKey

#: Number of uses between checks of the groups' ages.
AGEING_STEP = 32
#: Keys of a class share a group if used close together: maximum uses between them, and maximum keys of a group.
_GROUP_SPAN = 32
_GROUP_KEYS = 512


class Group:
    """Keys of one class, used at about ``used_at``. ``queue`` is the position of its queue in the order of all."""

    __slots__ = ("class_", "keys", "queued", "used_at")

    def __init__(self, class_: int, used_at: int) -> None:
        self.class_ = class_
        self.used_at = used_at
        self.keys: dict[ChunkKey, None] = {}
        self.queued = False


class AgeQueues:
    """See the module. The caller removes keys from ``Group.keys`` itself; an empty group is dropped when met."""

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
