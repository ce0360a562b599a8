from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tanghulu.errors import InvalidRequest
from tanghulu.store.node.space.allocator import OffsetAllocator
from tanghulu.store.node.space.frames import Frames


def test_the_worked_example_of_the_module() -> None:
    allocator = OffsetAllocator(1024, 64)
    assert [allocator.allocate(size) for size in (100, 64, 64)] == [0, 128, 192]
    allocator.free(128, 64)
    assert allocator.allocate(10) == 128
    for offset, size in ((0, 100), (128, 10), (192, 64)):
        allocator.free(offset, size)
    allocator.check()
    assert allocator.largest_free_bytes == allocator.free_bytes == 1024


def test_refusals() -> None:
    with pytest.raises(InvalidRequest):
        OffsetAllocator(10)
    with pytest.raises(InvalidRequest):
        OffsetAllocator(1000, 48)
    allocator = OffsetAllocator(640)
    assert allocator.allocate(641) is None
    for offset, size in ((64, 64), (576, 128)):
        with pytest.raises(AssertionError):
            allocator.free(offset, size)


def test_what_is_fenced_is_given_to_nobody() -> None:
    allocator = OffsetAllocator(1024, 64)
    assert [allocator.allocate(256) for _ in range(4)] == [0, 256, 512, 768]
    allocator.free(128, 512)  # [128, 640) is one hole
    allocator.raise_fence(256, 512)
    allocator.check()
    assert allocator.largest_free_bytes == 128
    assert allocator.free_bytes == 512
    assert [allocator.hole_at(offset) for offset in (128, 256, 512)] == [128, 256, 128]
    assert [allocator.allocate(128) for _ in range(3)] == [128, 512, None]
    allocator.free(128, 128)
    allocator.free(512, 384)  # over no border, next to the fence
    allocator.check()
    assert allocator.largest_free_bytes == 384
    allocator.lift_fence()
    allocator.check()
    assert allocator.largest_free_bytes == 768


@pytest.mark.parametrize("seed", range(8))
def test_a_seeded_life_with_fences(seed: int) -> None:
    """Values of all sizes, parts of ranges given back, fences raised and lifted; nothing overlaps, nothing is lost."""
    rng = random.Random(seed)
    allocator = OffsetAllocator(rng.choice([1 << 16, 100_032, 1 << 20]))
    taken: list[tuple[int, int]] = []
    for _ in range(400):
        roll = rng.random()
        if roll < 0.5:
            size = int(2 ** rng.uniform(4, 15))
            fits = allocator.rounded(size) <= allocator.largest_free_bytes
            offset = allocator.allocate(size)
            assert (offset is not None) == fits
            if offset is not None:
                start, end = allocator.fence
                assert not (offset < end and offset + size > start), "what is fenced is given to nobody"
                taken.append((offset, size))
        elif roll < 0.9 and taken:
            offset, size = taken.pop(rng.randrange(len(taken)))
            part = allocator.rounded(rng.randint(1, size))
            if part < size:  # as write buffers do
                taken.append((offset + part, size - part))
            allocator.free(offset, min(part, size))
        elif allocator.fence == (0, 0):
            frame = allocator.frames.frame_bytes
            start = rng.randrange(allocator.capacity_bytes) // frame * frame
            allocator.raise_fence(start, min(start + frame * rng.randint(1, 9), allocator.capacity_bytes))
        else:
            allocator.lift_fence()
        allocator.check()
        allocator.check_tiles(taken)
        allocator.frames.check(allocator.holes(), [])


def test_the_cheapest_window_is_that_of_a_search() -> None:
    rng = random.Random(3)
    for _ in range(60):
        capacity = 64 * rng.choice([100, 127])
        frames, position = Frames(capacity, 64), 0
        loose: list[tuple[int, int]] = []
        stays: list[tuple[int, int]] = []
        while position < capacity:
            length = min(64 * rng.randint(1, 9), capacity - position)
            kind = rng.random()
            if kind < 0.9:
                frames.taken(position, length)
                (loose if kind < 0.88 else stays).append((position, length))
            position += length
        for offset, length in loose:
            frames.loosened(offset, length)
        size = 64 * rng.randint(1, 40)
        window = frames.cheapest(size)
        found = [_cost(start, start + size, loose, stays) for start in range(0, capacity - size + 1, 64)]
        best = min((cost for cost in found if cost is not None), default=None)
        assert (window is None) == (best is None)
        if window is not None:
            assert window.end - window.start == size
            assert _cost(window.start, window.end, loose, stays) == best


def _cost(start: int, end: int, loose: list[tuple[int, int]], stays: list[tuple[int, int]]) -> int | None:
    def inside(ranges: list[tuple[int, int]]) -> int:
        return sum(length for offset, length in ranges if offset < end and offset + length > start)

    return None if inside(stays) else inside(loose)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 3000), st.integers(-50, -1)), max_size=80))
def test_ranges_never_overlap_and_nothing_is_lost(steps: list[int]) -> None:
    """Positive: allocate so much. Negative: free the n-th of what is taken."""
    allocator = OffsetAllocator(16384)
    taken: list[tuple[int, int]] = []
    for step in steps:
        if step > 0:
            fits = allocator.rounded(step) <= allocator.largest_free_bytes
            offset = allocator.allocate(step)
            assert (offset is not None) == fits
            if offset is not None:
                assert all(offset + step <= o or o + n <= offset for o, n in taken)
                taken.append((offset, step))
        elif taken:
            offset, size = taken.pop(-step % len(taken))
            allocator.free(offset, size)
        allocator.check()
        allocator.check_tiles(taken)
    assert allocator.used_bytes == sum(allocator.rounded(size) for _, size in taken)
    for offset, size in taken:
        allocator.free(offset, size)
    assert allocator.largest_free_bytes == allocator.capacity_bytes
