"""Making room: evict and move chunks so that a value fits. Owns the allocator and the eviction order.

Eviction is decided by the policy alone: victims are taken in its order, soft pins last, hard pins never, until as many
bytes are free as the value takes. With values of one size the first victim's hole fits exactly, and nothing else
happens. With mixed sizes the oldest chunks are scattered, and their holes are too small. Then residents are *moved*:
the window that is cheapest to vacate (see ``frames``) is fenced, and its residents are copied into the holes that the
victims left. So no chunk is evicted because of its location, and none is lost for a hole of the wrong size.

Ranges in use stay: reservations, write buffers, and leased residents, mapped or not. Pins prevent eviction but not
moving. All this is done in steps of at most ``STEP_RESIDENTS`` residents and ``STEP_BYTES`` copied bytes; a put that
needs more waits for its turns.

Waste: a value takes its size rounded up to the allocator's alignment, 64 bytes, independent of other sizes: 64 KiB take
64 KiB, 100,000 bytes take 100,032. A window is a whole number of frames, so up to one frame more than the value needs
(1/16,384 of the memory) is evicted ahead, which the next puts use. Example: 64 GiB full of 64 KiB chunks used in random
order, a value of 16 MiB. Frames have 4 MiB. The 256 oldest chunks are evicted, 16 MiB; of 16,381 windows of four frames
the one with most of their holes is taken, say three; its other 253 chunks are copied into the other holes.

If nothing can be moved (the SSD tier), victims are taken in the policy's order for twice the value's bytes; if they
leave no hole, the window with the fewest bytes is cleared, of those without pinned chunks or chunks being read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Generic, Protocol, TypeVar

from tanghulu.eviction.base import Policy
from tanghulu.eviction.fair import Fair
from tanghulu.store.node.space.allocator import OffsetAllocator
from tanghulu.store.node.space.frames import Window
from tanghulu.store.protocol.types import Pin
from tanghulu.types import ChunkKey

#: Residents dropped or moved in one step, and bytes copied in it.
STEP_RESIDENTS = 48
STEP_BYTES = 4 << 20
#: Residents evicted for a write buffer at a time.
MAX_CARVED = 4 * STEP_RESIDENTS
#: Cost of the choice of a window in a step.
_CHOICE = 16
#: Most residents with a begun or ended use that the frames have not received.
_MAX_CHANGED = 256
#: If nothing is moved: scattered victims may cost this many times the wanted bytes before a window is cleared.
_SCATTERED_LIMIT = 2
_NO_BOUND = sys.maxsize


class Resident(Protocol):
    """The owner of a range: a chunk in memory, or one in the SSD tier."""

    @property
    def key(self) -> ChunkKey:
        """Its key."""

    @property
    def offset(self) -> int:
        """The beginning of its range."""

    @property
    def range_bytes(self) -> int:
        """The length of its range in bytes, before rounding."""

    @property
    def pin(self) -> Pin:
        """The resident's protection from eviction."""

    @property
    def is_live(self) -> bool:
        """Whether it is in the order of evictions."""

    @property
    def evictable(self) -> bool:
        """Whether it may be dropped now."""

    @property
    def is_loose(self) -> bool:
        """Whether its range may be vacated now: by a move where residents are moved, else by dropping it."""


R = TypeVar("R", bound=Resident)
R_co = TypeVar("R_co", bound=Resident, covariant=True)


class Residents(Protocol[R_co]):
    """All owners of ranges, by key."""

    def find(self, key: ChunkKey) -> R_co | None:
        """Return the resident of ``key``, even if expired, while it has its range."""

    def __iter__(self) -> Iterator[R_co]: ...


class Space(Generic[R]):
    """Allocates ranges, evicting live residents of ``table``.

    ``place`` is called with a resident and its new offset once its bytes are there; without it nothing is moved.
    ``memory``: the residents' bytes; if it is empty, there are none.
    """

    def __init__(
        self,
        allocator: OffsetAllocator,
        table: Residents[R],
        make_policy: Callable[[], Policy],
        place: Callable[[R, int], None] | None = None,
        memory: memoryview = memoryview(b""),  # noqa: B008 - it is immutable
    ) -> None:
        self.allocator = allocator
        self.num_moved = self.moved_bytes = 0
        self._table = table
        self._place, self._memory = place, memory
        self._policies: dict[Pin, Policy] = {Pin.NONE: make_policy(), Pin.SOFT: make_policy()}
        self._noted: list[R] = []  # new or read in the current call; passed to the policies at its end
        #: By offset, the residents of each frame separately: a dict of all would be copied in one step as it grows.
        self._loose: list[dict[int, R]] = [{} for _ in range(allocator.frames.num_frames)]
        self._changed: dict[int, R] = {}  # by offset: use began or ended since the last update of the frames
        self._vacating = 0  # the length of the range that room is being made for
        self._steps: Iterator[bool] | None = None
        self._copying: tuple[int, int] | None = None  # (offset, bytes) of the target of a running copy
        #: Whether the last ``take`` that found no room has more to do at once.
        self.has_more_to_do = False

    @property
    def policy_name(self) -> str:
        """The policy that orders the evictions."""
        return self._policies[Pin.NONE].name

    def switch_policy(self, make_policy: Callable[[], Policy]) -> None:
        """Let another policy order the evictions; it begins with the last one's order. O(n)."""
        self.end_batch()
        for pin, old in self._policies.items():
            new = self._policies[pin] = make_policy()
            for key in old.victims():
                chunk = self._table.find(key)
                assert chunk is not None, f"the policy knows {key!r}, the table does not"
                new.begin_batch()
                new.add(key, chunk.range_bytes)

    def settle(self, chunk: R) -> None:
        """Make the chunk, now LIVE, evictable."""
        self.refresh(chunk)
        if chunk.pin is not Pin.HARD:
            self._noted.append(chunk)

    def leave(self, chunk: R, *, evicted: bool) -> None:
        """Remove the chunk, no longer LIVE; to be called while its range is still the same."""
        self._changed.pop(chunk.offset, None)
        if self._loose_at(chunk.offset) is not None:
            self._fix(chunk)
        if chunk.pin is not Pin.HARD:
            self.end_batch()
            self._policies[chunk.pin].remove(chunk.key, evicted=evicted)

    def refresh(self, chunk: R) -> None:
        """Record that a use of the LIVE chunk's range began or ended.

        The frames are updated when they are needed: most uses have ended by then, and nothing has changed.
        """
        self._changed[chunk.offset] = chunk
        if len(self._changed) >= _MAX_CHANGED:
            self._tell_frames()

    def _tell_frames(self) -> None:
        for offset, chunk in self._changed.items():
            is_loose = chunk.is_loose
            if (self._loose_at(offset) is not None) != is_loose:
                if is_loose:
                    self._loosen(chunk)
                else:
                    self._fix(chunk)
        self._changed.clear()

    def _loose_at(self, offset: int) -> R | None:
        return self._loose[offset // self.allocator.frames.frame_bytes].get(offset)

    def _loosen(self, chunk: R) -> None:
        self._loose[chunk.offset // self.allocator.frames.frame_bytes][chunk.offset] = chunk
        self.allocator.frames.loosened(chunk.offset, self.allocator.rounded(chunk.range_bytes))

    def _fix(self, chunk: R) -> None:
        frame = self._loose[chunk.offset // self.allocator.frames.frame_bytes]
        del frame[chunk.offset]
        if not frame:
            frame.clear()  # an emptied dict keeps its table, a cleared one does not
        self.allocator.frames.fixed(chunk.offset, self.allocator.rounded(chunk.range_bytes))

    def touch(self, chunk: R) -> None:
        """Record a read of the chunk."""
        if chunk.pin is not Pin.HARD:
            self._noted.append(chunk)

    def end_batch(self) -> None:
        """End the batch of one call: the policies receive its new and read chunks, the last one first.

        So LRU evicts leaves before the prefix they depend on. Any use of the order ends the batch by itself.
        """
        if not self._noted:
            return
        for policy in self._policies.values():
            policy.begin_batch()
        for chunk in reversed(self._noted):
            if not chunk.is_live:
                continue  # put twice before the master confirmed it
            policy = self._policies[chunk.pin]
            if not policy.touch(chunk.key):
                policy.add(chunk.key, chunk.range_bytes)
        self._noted.clear()

    def __contains__(self, chunk: R) -> bool:
        self.end_batch()
        return chunk.pin is not Pin.HARD and chunk.key in self._policies[chunk.pin]

    def take(self, size_bytes: int, drop: Callable[[R], None], max_dropped: int = _NO_BOUND) -> int | None:
        """Return the offset of a range of ``size_bytes``; None if there is none yet. ``drop`` frees a victim's range.

        Residents are dropped and moved as far as one step allows. After None ``has_more_to_do`` states whether the next
        call continues at once; otherwise ranges have to be freed first, or leases to end. Where nothing is moved there
        are no steps: None also if more than ``max_dropped`` had to be dropped; those already dropped make it easier for
        the next call.
        """
        offset = self.allocator.allocate(size_bytes)
        if offset is not None:
            return offset
        self._tell_frames()
        if self._place is None:
            return self._clear_window(size_bytes, drop, max_dropped)
        wanted = self.allocator.rounded(size_bytes)
        if self._vacating != wanted:
            self.stop_vacating()
            self._vacating, self._steps = wanted, self._vacate(wanted, drop, self._place)
        assert self._steps is not None
        more = next(self._steps, None)
        if more is not None:
            self.has_more_to_do = more
            return None
        self.stop_vacating()
        offset = self.allocator.allocate(size_bytes)
        assert offset is not None, "a vacated window has room"
        return offset

    def stop_vacating(self) -> None:
        """Give up the window being vacated, if any: its requester has left, or others come first."""
        self._steps, self._vacating, self.has_more_to_do = None, 0, False
        self._drop_copy()
        self.allocator.lift_fence()

    def _vacate(self, wanted: int, drop: Callable[[R], None], place: Callable[[R, int], None]) -> Iterator[bool]:
        """Evict, then move, until ``wanted`` bytes in one range are free. Yields after each step: is there more?"""
        allocator, frames, step = self.allocator, self.allocator.frames, _Step()
        while True:
            goal = frames.window_bytes(wanted)
            window = None
            while window is None:
                yield from self._evict_until(goal, wanted, drop, step)
                if allocator.largest_free_bytes >= wanted:
                    return
                window = frames.cheapest(wanted)
                step.spend(_CHOICE)
                missing = 0 if window is None else window.end - window.start + window.spill_bytes - allocator.free_bytes
                if window is None or (missing > 0 and goal > allocator.free_bytes):  # no evictable chunk is left
                    window = None
                    yield False
                    while frames.cheapest(wanted) is None:
                        yield False
                    step.begin()
                    goal = frames.window_bytes(wanted)
                elif missing > 0:
                    goal = allocator.free_bytes + missing
                    window = None
            allocator.raise_fence(window.start, window.end)
            yield from self._clear_out(window, wanted, drop, place, step)
            allocator.lift_fence()
            if allocator.largest_free_bytes >= wanted:
                return

    def _evict_until(self, goal: int, wanted: int, drop: Callable[[R], None], step: _Step) -> Iterator[bool]:
        """Evict until ``goal`` bytes are free, or ``wanted`` contiguous ones, or nothing more can be evicted."""
        allocator = self.allocator
        while allocator.free_bytes < goal and allocator.largest_free_bytes < wanted:
            if step.is_over:
                if allocator.frames.cheapest(wanted) is None:
                    return
                yield True
                step.begin()
            victims = self.oldest(goal - allocator.free_bytes, step.residents)
            if not victims:
                return
            for victim in victims:
                drop(victim)
                step.spend(1)
                if allocator.largest_free_bytes >= wanted:
                    return

    def _clear_out(
        self, window: Window, wanted: int, drop: Callable[[R], None], place: Callable[[R, int], None], step: _Step
    ) -> Iterator[bool]:
        """Move the window's residents until it is free, or one of them is in use, or a hole elsewhere fits."""
        allocator = self.allocator
        while (position := self._first_taken(window)) is not None and allocator.largest_free_bytes < wanted:
            if step.is_over:
                yield True
                step.begin()
                continue
            resident = self._loose_at(position)
            if resident is None:
                return
            target = allocator.allocate(resident.range_bytes)
            if target is not None:
                yield from self._move(resident, target, place, step)
                continue
            missing = allocator.rounded(resident.range_bytes)
            victims = self.oldest(missing, step.residents)
            if not victims:
                allocator.lift_fence()
                yield False
                step.begin()
                return
            for victim in victims:
                drop(victim)
                step.spend(1)
                if allocator.largest_free_bytes >= missing:
                    break

    def _first_taken(self, window: Window) -> int | None:
        """Return the start of the first range in the window that is not free; all before it is one hole."""
        begin = self.allocator.frames.begins(window.start)
        if begin == window.start:
            begin += self.allocator.hole_at(begin)
        return begin if begin < window.end else None

    def _move(self, resident: R, target: int, place: Callable[[R, int], None], step: _Step) -> Iterator[bool]:
        """Copy a resident to the range at ``target``, in pieces if large; it may be dropped or used in between."""
        source, size = resident.offset, resident.range_bytes
        self._copying = (target, size)
        for done in range(0, size, STEP_BYTES):
            if step.is_over:
                yield True
                step.begin()
            if self._loose_at(source) is not resident:
                self._drop_copy()
                return
            piece = min(STEP_BYTES, size - done)
            begin, to = source + done, target + done
            if self._memory:
                self._memory[to : to + piece] = self._memory[begin : begin + piece]
            step.spend(0, piece)
        self._copying = None
        self._fix(resident)
        place(resident, target)
        self.allocator.free(source, size)
        self._loosen(resident)
        step.spend(1)
        self.num_moved += 1
        self.moved_bytes += size

    def _drop_copy(self) -> None:
        if self._copying is not None:
            self.allocator.free(*self._copying)
            self._copying = None

    def _clear_window(self, size_bytes: int, drop: Callable[[R], None], max_dropped: int) -> int | None:
        """Make room in a tier that cannot move residents."""
        allocator = self.allocator
        wanted = allocator.rounded(size_bytes)
        num_left = max_dropped
        for chunk in self.oldest(wanted * _SCATTERED_LIMIT, num_left):
            drop(chunk)
            num_left -= 1
            if allocator.largest_free_bytes >= wanted:
                return allocator.allocate(size_bytes)
        window = allocator.frames.cheapest(wanted)
        if window is None:
            return None
        allocator.raise_fence(window.start, window.end)  # ranges freed inside stay apart from holes beside it
        while (position := self._first_taken(window)) is not None:
            if num_left <= 0:
                break
            num_left -= 1
            resident = self._loose_at(position)
            assert resident is not None, "a window that can be vacated has loose residents only"
            drop(resident)
        allocator.lift_fence()
        return allocator.allocate(size_bytes)

    def carve(
        self, wanted_bytes: int, least_bytes: int, max_evicted_bytes: int, drop: Callable[[R], None]
    ) -> tuple[int, int] | None:
        """Return (offset, bytes) of ``least_bytes`` to ``wanted_bytes``; None if free space is too scattered.

        The oldest residents are evicted, but none if more than ``max_evicted_bytes`` would be, and at most
        ``MAX_CARVED``: if they are small, this makes room for the next call.
        """
        self.stop_vacating()
        allocator = self.allocator
        missing = min(wanted_bytes - allocator.largest_free_bytes, 2 * wanted_bytes - allocator.free_bytes)
        for resident in self.oldest(missing if missing <= max_evicted_bytes else 0, MAX_CARVED):
            drop(resident)
        length = min(wanted_bytes, allocator.largest_free_bytes)
        offset = allocator.allocate(length) if length >= least_bytes else None
        return None if offset is None else (offset, length)

    def victims(self) -> Iterator[R]:
        """Yield everything that could be evicted now, in the order of eviction."""
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
        """Yield the chunks of one tenant in the order of their eviction; asserts that the eviction is fair."""
        self.end_batch()
        for policy in (self._policies[Pin.NONE], self._policies[Pin.SOFT]):
            assert isinstance(policy, Fair), f"{policy!r} knows no tenants"
            yield from self._evictable(policy.victims_of(tenant))

    def oldest_of(self, tenant: str, wanted_bytes: int, max_num: int) -> tuple[list[R], int]:
        """Return a tenant's next victims, up to ``wanted_bytes`` and ``max_num``, and the bytes missing to that."""
        chosen: list[R] = []
        for resident in islice(self.victims_of(tenant), max_num):
            if wanted_bytes <= 0:
                break
            chosen.append(resident)
            wanted_bytes -= resident.range_bytes
        return chosen, wanted_bytes

    def oldest(self, wanted_bytes: int, max_num: int | None = None) -> list[R]:
        """Return the next victims, up to ``wanted_bytes`` and ``max_num``."""
        chosen: list[R] = []
        victims = islice(self.victims(), max_num)
        while wanted_bytes > 0 and (chunk := next(victims, None)) is not None:
            chosen.append(chunk)
            wanted_bytes -= self.allocator.rounded(chunk.range_bytes)
        return chosen

    @property
    def in_between(self) -> list[tuple[int, int]]:
        """(offset, bytes) of ranges that are taken but belong to no resident: targets of running copies."""
        return [] if self._copying is None else [self._copying]

    def check(self) -> None:
        """Assert that the eviction order has exactly the LIVE chunks without a hard pin; check the loose ones."""
        self.allocator.check()
        self.end_batch()
        self._tell_frames()
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
        loose = {resident.offset: resident for resident in self._table if resident.is_loose}
        assert loose == dict(chain.from_iterable(map(dict.items, filter(None, self._loose)))), "what is loose"
        assert all(self._loose_at(offset) is each for offset, each in loose.items())
        rounded = self.allocator.rounded
        ranges = [(offset, rounded(resident.range_bytes)) for offset, resident in loose.items()]
        self.allocator.frames.check(self.allocator.holes(), ranges)
        assert self._vacating or (self._copying is None and self.allocator.fence == (0, 0))

    def __repr__(self) -> str:
        return f"Space({self.allocator!r}, {[len(p) for p in self._policies.values()]} evictable)"


class _Step:
    """The remainder of one step: residents to drop or move, bytes to copy."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Start the next step."""
        self.residents, self._bytes = STEP_RESIDENTS, STEP_BYTES

    def spend(self, residents: int, num_bytes: int = 0) -> None:
        """Count completed work."""
        self.residents -= residents
        self._bytes -= num_bytes

    @property
    def is_over(self) -> bool:
        """Whether the step is used up."""
        return self.residents <= 0 or self._bytes <= 0
