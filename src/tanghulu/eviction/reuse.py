"""The reuse-time policy: evicts the chunk whose slot would earn the fewest hits, as learned from past reuse times.

A chunk's class is what is known when it is used: how often it was used before (0, 1, 2 or more), how many turns its
prompt had before this one (0, 1, 2 or more; a prompt that continues a known prefix is one turn further than that
prefix), and whether it is at the prompt's end. ``ReuseTimes`` learns, for each class, the ages at which chunks were
used again, from residents and from ghosts, and ranks every class at every age. The chunk of lowest rank is evicted,
but only among leaves: a chunk goes after those whose prefix it is.

Example, a chat: the first turn's blocks are used again in 28 cases of 100, after 42 to 486 s; those of a third turn in
62. A cache that lasts 60 s under LRU keeps everything for 60 s and so serves few of the second turns. Here old blocks
of third turns, soon to be used, outlive young ones of first turns, which would not last until they are used anyway.

Requests are delimited by ``begin_batch``, tail first. Keys used since the last one are pending: they have no class
yet, and go last. Ghosts (class and time of last use of evicted keys) are bounded. A ``Duel`` against LRU decides which
order counts: if the past predicts nothing, this is LRU.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator

from tanghulu.eviction.base import Policy
from tanghulu.eviction.reuse_times import AGEING_STEP, AgeQueues, Group, ReuseTimes
from tanghulu.types import ChunkKey

#: Maximum ghosts: per resident key, and the minimum of that bound.
GHOSTS_PER_KEY = 8
MIN_GHOSTS = 16384
#: A longer batch is cut, so that its keys get their class.
MAX_PENDING = 1024

_MAX_USES = 2
_MAX_TURN = 2
_NUM_CLASSES = (_MAX_USES + 1) * (_MAX_TURN + 1) * 2
#: Number of a batch's keys that count as its end: the last whole block and the partial one after it.
_END_KEYS = 2
#: Uses before the first fit of the histograms, and maximum uses between fits; otherwise after half as many again.
_FIRST_FIT = 512
_FIT_STEP = 8192
#: One eviction in this number is judged.
_DUEL_STEP = 4
#: Length of prefix followed to see that a new link makes no cycle.
_MAX_DEPTH = 4096
MAX_PAIRS = 4096
#: Each decided pair moves the score by this fraction of the way to +1 or -1.
_STEP = 1 / 128
#: The challenger is dropped below the lower score and restored above the upper one.
_DROP_BELOW = -0.12
_TAKE_ABOVE = 0.0


class Duel:
    """A duel of two eviction orders: the one whose victims were recently used again later leads (Belady's rule).

    When both orders name a victim and they differ, the pair is remembered. If the key that A would have evicted is used
    before the one that B would have evicted, A was wrong, whatever was actually evicted. A pair of which neither
    returns has no result and is dropped. In the spirit of set duelling (Qureshi et al., ISCA'07), with pairs instead of
    sets.

    ``challenger_leads`` names the order to follow: the challenger's until it has lost enough.
    """

    def __init__(self) -> None:
        self._pairs: OrderedDict[int, tuple[ChunkKey, ChunkKey]] = OrderedDict()
        self._by_key: dict[ChunkKey, int] = {}
        self._next = 0
        self.score = 0.0
        self.challenger_leads = True

    def __len__(self) -> int:
        return len(self._pairs)

    def pose(self, champions: ChunkKey, challengers: ChunkKey) -> None:
        """Remember the two victims named at one moment; ignored if one is in another pair, or both are the same."""
        if champions == challengers or champions in self._by_key or challengers in self._by_key:
            return
        self._next += 1
        self._pairs[self._next] = (champions, challengers)
        self._by_key[champions] = self._by_key[challengers] = self._next
        if len(self._pairs) > MAX_PAIRS:
            _, pair = self._pairs.popitem(last=False)
            for key in pair:
                del self._by_key[key]

    def used(self, key: ChunkKey) -> None:
        """Note that ``key`` was used: if it is in a pair, the order that would have evicted it was wrong."""
        number = self._by_key.get(key)
        if number is None:
            return
        champions, challengers = self._pairs.pop(number)
        del self._by_key[champions], self._by_key[challengers]
        right = 1.0 if key == champions else -1.0
        self.score += (right - self.score) * _STEP
        if self.score < _DROP_BELOW:
            self.challenger_leads = False
        elif self.score > _TAKE_ABOVE:
            self.challenger_leads = True

    def check(self) -> None:
        """Assert that pairs and keys agree and are bounded."""
        assert len(self._pairs) <= MAX_PAIRS
        assert len(self._by_key) == 2 * len(self._pairs)
        assert -1 <= self.score <= 1


class _Entry:
    """A resident key. ``group`` is None while it is pending; ``parent`` is the chunk of the preceding prefix."""

    __slots__ = ("alive", "class_", "group", "key", "num_children", "parent", "seen", "turn", "used_at", "uses")

    def __init__(self, key: ChunkKey) -> None:
        self.key = key
        self.alive = True  # still resident
        self.used_at = 0
        self.class_ = 0
        self.uses = 0
        self.turn = 0
        self.seen = False  # known before the pending batch
        self.group: Group | None = None
        self.parent: _Entry | None = None
        self.num_children = 0


class Reuse(Policy):
    """The reuse-time policy. Every call is O(1), amortised; the fits in between cost about a millisecond each."""

    name = "reuse"

    def __init__(self) -> None:
        self._entries: OrderedDict[ChunkKey, _Entry] = OrderedDict()  # from the least to the most recently used
        self._ghosts: OrderedDict[ChunkKey, tuple[int, int, int, int]] = OrderedDict()  # used_at, class, uses, turn
        self._pending: dict[_Entry, None] = {}
        self._times = ReuseTimes(_NUM_CLASSES)
        self._queues = AgeQueues(_NUM_CLASSES)
        self._duel = Duel()
        self._now = 0  # adds and touches so far
        self._next_fit = _FIRST_FIT
        self._next_ageing = AGEING_STEP
        self._num_evictions = 0
        self._min_ghosts = MIN_GHOSTS

    @property
    def num_ghosts(self) -> int:
        """Number of ghosts, at most ``max(MIN_GHOSTS, GHOSTS_PER_KEY * keys)``."""
        return len(self._ghosts)

    def sampled(self, rate: float) -> None:
        """Remember as large a share of the ghosts."""
        self._min_ghosts = max(1, round(rate * MIN_GHOSTS))

    # --- changes of keys

    def begin_batch(self) -> None:
        """Assign classes to the pending keys, which were one request, its last key first."""
        if self._pending:
            self._classify()
        if self._now >= self._next_ageing:
            self._next_ageing = self._now + AGEING_STEP
            self._queues.age(self._now)
        if self._now >= self._next_fit:
            self._next_fit = self._now + min(_FIT_STEP, max(_FIRST_FIT, self._now // 2))
            self._times.fit()
            self._queues.rank(self._times.ranks)

    def add(self, key: ChunkKey, size_bytes: int) -> None:
        """Add ``key``, with the history of its ghost."""
        assert key not in self._entries, f"{key!r} was added before"
        entry = self._entries[key] = _Entry(key)
        ghost = self._ghosts.pop(key, None)
        self._now += 1
        if ghost is not None:
            used_at, class_, entry.uses, entry.turn = ghost
            entry.seen = True
            self._times.reused(class_, self._now - used_at)
            self._duel.used(key)
        self._pend(entry)

    def touch(self, key: ChunkKey) -> bool:
        """Note that ``key`` was used again, and learn from its age."""
        entry = self._entries.get(key)
        if entry is None:
            return False
        self._now += 1
        self._entries.move_to_end(key)
        if entry.group is not None:  # otherwise used twice in one request
            self._times.reused(entry.class_, self._now - entry.used_at)
            self._duel.used(key)
            if not entry.num_children:
                del entry.group.keys[key]
            entry.group = None
            entry.seen = True
            self._pend(entry)
        return True

    def _pend(self, entry: _Entry) -> None:
        self._pending[entry] = None
        if len(self._pending) >= MAX_PENDING:
            self.begin_batch()

    def remove(self, key: ChunkKey, *, evicted: bool) -> None:
        """Drop ``key``; an evicted one stays as a ghost."""
        entry = self._entries[key]
        if evicted:
            self._judge()
            self._remember(entry)
        del self._entries[key]
        if entry.group is None:
            del self._pending[entry]
        else:
            entry.group.keys.pop(key, None)
        entry.alive = False
        self._unlink(entry)
        limit = max(self._min_ghosts, GHOSTS_PER_KEY * len(self._entries))
        while len(self._ghosts) > limit:
            self._ghosts.popitem(last=False)

    def _judge(self) -> None:
        self._num_evictions += 1
        if self._num_evictions % _DUEL_STEP == 0:
            first = self._queues.first()
            if first is not None:
                self._duel.pose(next(iter(self._entries)), first)

    def _remember(self, entry: _Entry) -> None:
        if entry.group is not None:  # a pending key has no class to learn from it
            self._ghosts[entry.key] = (entry.used_at, entry.class_, entry.uses, entry.turn)

    def _unlink(self, entry: _Entry) -> None:
        parent, entry.parent = entry.parent, None
        if parent is not None:
            parent.num_children -= 1
            self._offer(parent)

    def _offer(self, entry: _Entry) -> None:
        """Add a classified leaf to the queues from which victims are taken."""
        group = entry.group
        if group is not None and entry.num_children == 0 and entry.alive:
            group.keys[entry.key] = None
            self._queues.enqueue(group, self._now)

    # --- a request's keys

    def _classify(self) -> None:
        batch = list(self._pending)
        self._pending.clear()
        self._link(batch)
        turn = _turn_of(batch)
        now, entered = self._now, self._times.entered
        first_class = turn * (_MAX_USES + 1) * 2
        group, num_alike = self._queues.group_for(first_class, now), 0
        for position, entry in enumerate(batch):
            if entry.seen:
                if entry.uses < _MAX_USES:
                    entry.uses += 1
            else:
                entry.uses, entry.turn = 0, turn
            class_ = first_class + entry.uses * 2 + (position < _END_KEYS)
            if class_ != group.class_:
                entered(group.class_, num_alike)
                group, num_alike = self._queues.group_for(class_, now), 0
            entry.class_, entry.used_at, entry.group = class_, now, group
            num_alike += 1
            if not entry.num_children:
                self._offer(entry)
        entered(group.class_, num_alike)

    def _link(self, batch: list[_Entry]) -> None:
        """Link each key of a batch to the following one as its parent, unless it has one already."""
        for entry, parent in itertools.pairwise(batch):
            has_parent = entry.parent is not None and entry.parent.alive
            if not has_parent and (not entry.num_children or not _stands_on(parent, entry)):
                entry.parent = parent
                parent.num_children += 1

    # --- the order

    def victims(self) -> Iterator[ChunkKey]:
        """Yield leaves by rank, then their parents and pending keys by age; or all by age, if LRU does better."""
        if not self._duel.challenger_leads:
            yield from self._entries
            return
        first = self._queues.first()
        if first is not None:
            yield from self._queues.keys()
        for key, entry in self._entries.items():
            if entry.group is None or entry.num_children:
                yield key

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._entries

    def check(self) -> None:
        """Assert that leaves, links, pending keys, ghosts and queues agree."""
        self._queues.check()
        self._times.check()
        self._duel.check()
        children: dict[ChunkKey, int] = {}
        for entry in self._entries.values():
            if entry.parent is not None and entry.parent.alive:
                assert self._entries[entry.parent.key] is entry.parent
                children[entry.parent.key] = children.get(entry.parent.key, 0) + 1
        for key, entry in self._entries.items():
            assert entry.num_children == children.get(key, 0), f"{key!r} counts its children wrongly"
            assert (entry.group is None) == (entry in self._pending)
            is_leaf = entry.group is not None and entry.num_children == 0
            assert (entry.group is not None and key in entry.group.keys) == is_leaf
        assert len(self._pending) < MAX_PENDING
        assert not self._ghosts.keys() & self._entries.keys()
        assert len(self._ghosts) <= max(self._min_ghosts, GHOSTS_PER_KEY * (len(self._entries) + 1))

    def __repr__(self) -> str:
        order = "reuse" if self._duel.challenger_leads else "lru"
        return f"Reuse({len(self._entries)} keys, {len(self._ghosts)} ghosts, follows {order}, {self._duel.score:+.2f})"


def _turn_of(batch: list[_Entry]) -> int:
    """Return one more than the turn of the longest previously known prefix; 0 for a prompt that begins anew."""
    turn = 0
    for entry in reversed(batch):
        if not entry.seen:
            break
        turn = entry.turn + 1
    return min(turn, _MAX_TURN)


def _stands_on(entry: _Entry, other: _Entry) -> bool:
    """Return whether ``other`` is ``entry`` or in its prefix; also true if the prefix is too long to search."""
    current: _Entry | None = entry
    for _ in range(_MAX_DEPTH):
        if current is None:
            return False
        if current is other:
            return True
        current = current.parent
    return True
