from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tanghulu.errors import InvalidRequest
from tanghulu.store.node.allocator import OffsetAllocator


def test_the_worked_example_of_the_module() -> None:
    allocator = OffsetAllocator(1024, 64)
    assert [allocator.allocate(size) for size in (100, 64, 64)] == [0, 128, 192]
    allocator.free(128)
    assert allocator.allocate(10) == 128
    for offset in (0, 128, 192):
        allocator.free(offset)
    allocator.check()
    assert allocator.largest_free_bytes == allocator.free_bytes == 1024


def test_refusals() -> None:
    with pytest.raises(InvalidRequest):
        OffsetAllocator(10)
    with pytest.raises(InvalidRequest):
        OffsetAllocator(1000, 48)
    allocator = OffsetAllocator(640)
    assert allocator.allocate(641) is None
    with pytest.raises(AssertionError):
        allocator.free(64)


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
            offset, _ = taken.pop(-step % len(taken))
            allocator.free(offset)
        allocator.check()
    assert allocator.used_bytes == sum(allocator.rounded(size) for _, size in taken)
    for offset, _ in taken:
        allocator.free(offset)
    assert allocator.largest_free_bytes == allocator.capacity_bytes
