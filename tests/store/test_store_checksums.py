"""Checksums that are computed piece by piece are those of the whole."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tanghulu.errors import InvalidRequest
from tanghulu.store import checksums as sums


@given(
    value=st.binary(min_size=1, max_size=300),
    part_bytes=st.integers(0, 320),
    cuts=st.lists(st.integers(1, 299), max_size=6),
)
def test_however_a_value_is_cut_its_checksums_are_the_same(value: bytes, part_bytes: int, cuts: list[int]) -> None:
    edges = [0, *sorted({cut for cut in cuts if cut < len(value)}), len(value)]
    running = sums.RunningChecksums(len(value), part_bytes)
    for begin, end in itertools.pairwise(edges):
        running.add(memoryview(value)[begin:end])
    assert running.end() == sums.compute(value, part_bytes)
    assert sums.matches(value, sums.compute(value, part_bytes))


def test_too_many_parts_are_refused_before_anything_is_computed() -> None:
    size = 10 * (sums.MAX_PARTS + 1)
    for refused in (lambda: sums.RunningChecksums(size, 10), lambda: sums.compute(bytes(size), 10)):
        with pytest.raises(InvalidRequest, match="more than 4096 parts"):
            refused()
    assert sums.part_length(size, 11) == 11
