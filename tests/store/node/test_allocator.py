from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tanghulu.errors import InvalidRequest
from tanghulu.store.node.state.allocator import OffsetAllocator


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
