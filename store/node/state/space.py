"""Making room: which chunks go so that a value fits. Owns the allocator and the eviction order.

Victims are taken in the policy's order until a hole is large enough. With values of one size the first victim's hole
fits exactly. With mixed sizes the oldest chunks may lie scattered, and dropping them all would empty the node without
making one large hole; so after twice the wanted bytes went in vain, the cheapest window is cleared instead: the run of
neighbouring holes and evictable chunks, at least as long as the value, that holds the fewest bytes. If leased or
hard-pinned chunks cut every window short, nothing more is dropped.

Example: capacity 1 MiB full of 4 KiB chunks, a value of 128 KiB. LRU's 64 oldest chunks lie scattered: dropping them
(256 KiB) gives no hole of 128 KiB. The window with the most holes of them already needs perhaps 20 more.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from tanghulu.eviction.base import Policy
from tanghulu.eviction.fair import Fair
from tanghulu.store.node.state.allocator import OffsetAllocator
from tanghulu.store.protocol.types import Pin
from tanghulu.types import ChunkKey

#: Scattered victims may cost this many times the wanted bytes before a window is looked for.
_SCATTERED_LIMIT = 2


class Resident(Protocol):
    """What has a range: a chunk in memory, or one in the SSD tier."""

    @property
    def key(self) -> ChunkKey:
        """Names it."""
        ...

    @property
    def offset(self) -> int:
        """Where its range begins."""
        ...

    @property
    def range_bytes(self) -> int:
        """How long its range is, before rounding."""
        ...

    @property
    def pin(self) -> Pin:
        """How it stands towards eviction."""
        ...

    @property
    def is_live(self) -> bool:
        """Whether it stands in the order of evictions."""
        ...

    @property
    def evictable(self) -> bool:
        """Whether it may be dropped now."""
        ...


R = TypeVar("R", bound=Resident)
R_co = TypeVar("R_co", bound=Resident, covariant=True)


class Residents(Protocol[R_co]):
    """All that have a range, found by key."""

    def find(self, key: ChunkKey) -> R_co | None:
        """The one of ``key``."""
        ...

    def __iter__(self) -> Iterator[R_co]: ...


class Space(Generic[R]):
    """Allocates ranges, evicting live residents of ``table``. ``drop`` must free the range of what it is given.

    ``others`` tells the (offset, bytes) of what is taken and no resident's.
    """

    def __init__(
        self,
        allocator: OffsetAllocator,
        table: Residents[R],
        make_policy: Callable[[], Policy],
        others: Callable[[], Iterable[tuple[int, int]]] = tuple,
    ) -> None:
        self.allocator = allocator
        self._others = others
        self._table = table
        self._policies: dict[Pin, Policy] = {Pin.NONE: make_policy(), Pin.SOFT: make_policy()}
        self._noted: list[R] = []  # came or were read in the call that is being served; the policies hear at its end

    @property
    def policy_name(self) -> str:
        """The policy that orders the evictions."""
        return self._policies[Pin.NONE].name

    def switch_policy(self, make_policy: Callable[[], Policy]) -> None:
        """Let another policy order the evictions; it begins with the order of the last one. O(n)."""
        self.end_batch()
        for pin, old in self._policies.items():
            new = self._policies[pin] = make_policy()
            for key in old.victims():
                chunk = self._table.find(key)
                assert chunk is not None, f"the policy knows {key!r}, the table does not"
                new.begin_batch()
                new.add(key, chunk.range_bytes)

    def settle(self, chunk: R) -> None:
        """The chunk became LIVE and may be evicted from now on."""
        if chunk.pin is not Pin.HARD:
            self._noted.append(chunk)

    def leave(self, chunk: R, *, evicted: bool) -> None:
        """The chunk is no longer LIVE."""
        if chunk.pin is not Pin.HARD:
            self.end_batch()
            self._policies[chunk.pin].remove(chunk.key, evicted=evicted)

    def touch(self, chunk: R) -> None:
        """The chunk was read."""
        if chunk.pin is not Pin.HARD:
            self._noted.append(chunk)

    def end_batch(self) -> None:
        """What came or was read since the last end was one call's: the policies hear of it, the last chunk first.

        So LRU evicts leaves before the prefix they stand on. Whatever asks for the order ends the batch by itself.
        """
        if not self._noted:
            return
        for policy in self._policies.values():
            policy.begin_batch()
        for chunk in reversed(self._noted):
            if not chunk.is_live:
                continue  # put twice before the master knew of it
            policy = self._policies[chunk.pin]
            if chunk.key in policy:
                policy.touch(chunk.key)
            else:
                policy.add(chunk.key, chunk.range_bytes)
        self._noted.clear()

    def __contains__(self, chunk: R) -> bool:
        self.end_batch()
        return chunk.pin is not Pin.HARD and chunk.key in self._policies[chunk.pin]

    def take(self, size_bytes: int, drop: Callable[[R], None], *, sparing: bool = False) -> int | None:
        """The offset of a range of ``size_bytes``, evicting what it must; None if leases or hard pins stand in the way.

        ``sparing`` drops nothing in vain: for puts that wait and try again and again.
        """
        offset = self.allocator.allocate(size_bytes)
        if offset is not None:
            return offset
        wanted = self.allocator.rounded(size_bytes)
        for chunk in self.oldest(0 if sparing else wanted * _SCATTERED_LIMIT):
            drop(chunk)
            if self.allocator.largest_free_bytes >= wanted:
                return self.allocator.allocate(size_bytes)
        window = self._cheapest_window(wanted)
        if window is None:
            return None
        for chunk in window:
            drop(chunk)
        offset = self.allocator.allocate(size_bytes)
        assert offset is not None, "a cleared window has room"
        return offset

    def carve(
        self, wanted_bytes: int, least_bytes: int, max_evicted_bytes: int, drop: Callable[[R], None]
    ) -> tuple[int, int] | None:
        """(offset, bytes) of a range of ``least_bytes`` to ``wanted_bytes``; None if what is free is too scattered.

        The oldest residents give way, but none if more than ``max_evicted_bytes`` had to go.
        """
        allocator = self.allocator
        missing = min(wanted_bytes - allocator.largest_free_bytes, 2 * wanted_bytes - allocator.free_bytes)
        for resident in self.oldest(missing if missing <= max_evicted_bytes else 0):
            drop(resident)
        length = min(wanted_bytes, allocator.largest_free_bytes)
        offset = allocator.allocate(length) if length >= least_bytes else None
        return None if offset is None else (offset, length)

    def victims(self) -> Iterator[R]:
        """Everything that could be evicted now, the first to go first."""
        self.end_batch()
        for policy in (self._policies[Pin.NONE], self._policies[Pin.SOFT]):
            yield from self._evictable(policy.victims())

    def _evictable(self, keys: Iterator[ChunkKey]) -> Iterator[R]:
        for key in keys:
            chunk = self._table.find(key)
            assert chunk is not None, f"the policy knows {key!r}, the table does not"
            if chunk.evictable:
                yield chunk

    def victims_of(self, tenant: str) -> Iterator[R]:
        """The same for the chunks of one tenant; asserts that the eviction is fair."""
        self.end_batch()
        for policy in (self._policies[Pin.NONE], self._policies[Pin.SOFT]):
            assert isinstance(policy, Fair), f"{policy!r} knows no tenants"
            yield from self._evictable(policy.victims_of(tenant))

    def oldest_of(self, tenant: str, wanted_bytes: int) -> tuple[list[R], int]:
        """(the tenant's first to go, as many as hold ``wanted_bytes``; the bytes that are missing to that)."""
        chosen: list[R] = []
        for resident in self.victims_of(tenant):
            if wanted_bytes <= 0:
                break
            chosen.append(resident)
            wanted_bytes -= resident.range_bytes
        return chosen, wanted_bytes

    def oldest(self, wanted_bytes: int) -> list[R]:
        """The first to go, as many as hold ``wanted_bytes``."""
        chosen: list[R] = []
        victims = self.victims()
        while wanted_bytes > 0 and (chunk := next(victims, None)) is not None:
            chosen.append(chunk)
            wanted_bytes -= self.allocator.rounded(chunk.range_bytes)
        return chosen

    def _cheapest_window(self, wanted: int) -> list[R] | None:
        """What to evict for a hole of ``wanted`` bytes so that the fewest bytes go; O(n log n), rarely needed."""
        rounded = self.allocator.rounded
        fixed = [(c.offset, rounded(c.range_bytes)) for c in self._table if not c.evictable]
        edges = sorted((offset, offset + length) for offset, length in [*fixed, *self._others()])
        starts = [0, *(end for _, end in edges)]
        ends = [*(start for start, _ in edges), self.allocator.capacity_bytes]
        movable = sorted((c for c in self._table if c.evictable), key=_offset)
        best: tuple[int, list[R]] | None = None
        for start, end in zip(starts, ends, strict=True):
            if end - start < wanted:
                continue
            inside = movable[bisect_left(movable, start, key=_offset) : bisect_left(movable, end, key=_offset)]
            begins = [start, *(c.offset + rounded(c.range_bytes) for c in inside)]
            found = _cheapest_run(inside, [begin for begin in begins if begin + wanted <= end], wanted)
            if best is None or found[0] < best[0]:
                best = found
        return None if best is None else best[1]

    def check(self) -> None:
        """Assert that exactly the LIVE chunks without a hard pin are in the eviction order."""
        self.allocator.check()
        self.end_batch()
        known: set[ChunkKey] = set()
        for pin, policy in self._policies.items():
            policy.check()
            keys = list(policy.victims())
            assert len(keys) == len(policy) == len(set(keys))
            known.update(keys)
            for key in keys:
                chunk = self._table.find(key)
                assert chunk is not None, f"{key!r} is in the eviction order only"
                assert chunk.pin is pin

    def __repr__(self) -> str:
        return f"Space({self.allocator!r}, {[len(p) for p in self._policies.values()]} evictable)"


def _offset(chunk: Resident) -> int:
    return chunk.offset


def _cheapest_run(chunks: list[R], begins: list[int], wanted: int) -> tuple[int, list[R]]:
    """(bytes, chunks) to drop for a hole of ``wanted`` bytes at one of ``begins``, the one with the fewest bytes.

    A best hole begins where the free stretch starts or right behind a chunk, so those are all that need trying;
    ``begins`` rises, and the window over ``chunks`` (by offset) slides with it.
    """
    best: tuple[int, int, int] | None = None
    first = last = cost = 0  # chunks[first:last] lie in the window
    for begin in begins:
        while last < len(chunks) and chunks[last].offset < begin + wanted:
            cost += chunks[last].range_bytes
            last += 1
        while first < last and chunks[first].offset < begin:
            cost -= chunks[first].range_bytes
            first += 1
        if best is None or cost < best[0]:
            best = (cost, first, last)
    assert best is not None, "a stretch of the wanted length has a beginning"
    return best[0], chunks[best[1] : best[2]]
