"""Pages are mapped before long copies, each unit once."""

from __future__ import annotations

import mmap
import os
import resource
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tanghulu.transfer_engine.core.page_touch import UNIT_BYTES, PageToucher, TouchedUnits

MIB = 1 << 20


def test_a_range_is_rounded_to_units_and_new_once() -> None:
    units = TouchedUnits(MIB)
    assert units.fresh(100_000, 100_000) == (65_536, 196_608)
    assert units.fresh(131_072, 65_536) is None
    assert units.fresh(131_072, 200_000) == (262_144, 131_072)


def test_the_last_unit_ends_with_the_mapping() -> None:
    assert TouchedUnits(UNIT_BYTES + 5).fresh(UNIT_BYTES, 5) == (UNIT_BYTES, 5)


WISHES = st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(1, 1 << 30)), max_size=8)


@given(st.integers(1, 20 * UNIT_BYTES), WISHES)
def test_every_used_unit_was_in_a_fresh_range_before(size: int, wishes: list[tuple[int, int]]) -> None:
    units, covered = TouchedUnits(size), set[int]()
    for begin, extent in wishes:
        offset = begin % size
        length = 1 + extent % (size - offset)
        fresh = units.fresh(offset, length)
        if fresh is not None:
            start, count = fresh
            assert start % UNIT_BYTES == 0
            assert 0 < count <= size - start
            covered |= set(range(start // UNIT_BYTES, -(-(start + count) // UNIT_BYTES)))
        assert set(range(offset // UNIT_BYTES, (offset + length - 1) // UNIT_BYTES + 1)) <= covered


@pytest.fixture
def area() -> Iterator[mmap.mmap]:
    """A second mapping of memory whose pages exist, as a client's is."""
    fd = os.memfd_create("pages")
    os.ftruncate(fd, 8 * MIB)
    os.pwrite(fd, bytes(8 * MIB), 0)
    with mmap.mmap(fd, 8 * MIB) as mapped:
        os.close(fd)
        yield mapped


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def test_a_touched_range_is_written_without_faults(area: mmap.mmap) -> None:
    toucher, value = PageToucher(area), b"x" * (4 * MIB)
    toucher.touch(MIB, 4 * MIB)
    if toucher._units is None:
        pytest.skip("hardware: this kernel has no MADV_POPULATE_READ")
    before = faults()
    area[MIB : 5 * MIB] = value
    assert faults() - before < 16, "a thousand pages were mapped already"


def test_short_ranges_are_left_to_the_faults(area: mmap.mmap) -> None:
    toucher = PageToucher(area)
    toucher.touch(0, UNIT_BYTES - 1)
    assert toucher._units is not None
    assert toucher._units.fresh(0, 1) == (0, UNIT_BYTES)


def test_a_kernel_that_cannot_is_asked_once() -> None:
    calls = 0

    class Old:
        def __len__(self) -> int:
            return MIB

        def madvise(self, *arguments: int) -> None:
            nonlocal calls
            calls += 1
            raise OSError(22, "Invalid argument")

    toucher = PageToucher(Old())  # type: ignore[arg-type]
    for _ in range(3):
        toucher.touch(0, MIB)
    assert calls == 1
