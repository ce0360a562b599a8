"""Checksums that are computed piece by piece are those of the whole."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tanghulu.errors import InvalidRequest
from tanghulu.store.protocol import checksums as sums


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
    assert running.complete
    assert running.end() == sums.compute(value, part_bytes)
    assert sums.matches(value, sums.compute(value, part_bytes))


@given(
    value=st.binary(min_size=1, max_size=300),
    part_bytes=st.integers(0, 320),
    ahead=st.integers(0, 320),
    cuts=st.lists(st.integers(1, 299), max_size=6),
)
def test_what_was_seen_ahead_is_not_added_twice(value: bytes, part_bytes: int, ahead: int, cuts: list[int]) -> None:
    edges = [0, *sorted({cut for cut in cuts if cut < len(value)}), len(value)]
    rest = sums.Rest(sums.RunningChecksums(len(value), part_bytes))
    rest.running.add(memoryview(value)[:ahead])
    for begin, end in itertools.pairwise(edges):
        assert rest.num_shown == begin
        rest.add(memoryview(value)[begin:end])
    assert rest.running.complete
    assert rest.running.end() == sums.compute(value, part_bytes)


def test_what_may_have_been_overwritten_is_never_complete() -> None:
    running = sums.RunningChecksums(6)
    running.add(memoryview(b"abc"))
    assert not running.complete
    running.void()
    running.add(memoryview(b"def"))
    assert not running.complete


@given(
    value=st.binary(min_size=1, max_size=300),
    part_bytes=st.integers(1, 50),
    first=st.integers(0, 9),
    wrong=st.booleans(),
)
def test_parts_that_were_computed_as_they_came(value: bytes, part_bytes: int, first: int, wrong: bool) -> None:
    whole = sums.compute(value, part_bytes)
    begin = min(first, len(whole.parts) - 1) * part_bytes
    arrived = bytearray(value[begin:])
    arrived[0] ^= wrong
    computed = sums.compute(bytes(arrived), part_bytes)
    assert sums.are_from(computed, whole, begin) is not wrong
    assert sums.matches_from(bytes(arrived), whole, begin) is not wrong


def test_too_many_parts_are_refused_before_anything_is_computed() -> None:
    size = 10 * (sums.MAX_PARTS + 1)
    for refused in (lambda: sums.RunningChecksums(size, 10), lambda: sums.compute(bytes(size), 10)):
        with pytest.raises(InvalidRequest, match="more than 4096 parts"):
            refused()
    assert sums.part_length(size, 11) == 11
