"""The gateway's decisions without a gateway: which clients to keep, what a range means, which keys a pattern is in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tanghulu.errors import InvalidRequest, Overloaded
from tanghulu.store.gateway import chunks_api as matching_module
from tanghulu.store.gateway.bounds import InFlight
from tanghulu.store.gateway.chunks_api import MAX_PATTERN, matching
from tanghulu.store.gateway.clients import ClientCache
from tanghulu.store.gateway.values_api import RangeNotSatisfiable, is_single_range, part_of


class Value:
    """What a book keeps."""


def book() -> ClientCache[str, Value]:
    return ClientCache(2, idle_s=10.0, verify_s=1.0)


def test_the_least_recently_used_goes_first() -> None:
    kept, values = book(), {name: Value() for name in "abc"}
    for name in "ab":
        assert kept.enter(name, values[name], 0.0) == []
    assert kept.take("a", 1.0) is values["a"]
    assert kept.give_back("a", values["a"], 1.0) == []
    assert kept.enter("c", values["c"], 2.0) == [values["b"]]
    assert kept.take("b", 3.0) is None


def test_what_is_in_use_stays() -> None:
    kept = book()
    for name in "ab":
        kept.enter(name, Value(), 0.0)
        kept.take(name, 0.0)
    with pytest.raises(Overloaded, match="2 tokens"):
        kept.enter("c", Value(), 1.0)
    assert kept.expire(100.0) == []


def test_a_refused_token_leaves_when_its_last_user_does() -> None:
    kept, value, successor = book(), Value(), Value()
    kept.enter("a", value, 0.0)
    assert kept.take("a", 0.0) is kept.take("a", 0.0) is value
    assert kept.drop("a", value) == []
    assert kept.take("a", 0.0) is None
    kept.enter("a", successor, 0.0)
    assert kept.drop("a", value) == [], "it is another's place now"
    assert kept.give_back("a", value, 1.0) == []
    assert kept.give_back("a", value, 1.0) == [value]
    assert kept.take("a", 1.0) is successor
    assert kept.clear() == [successor]


def test_a_token_is_verified_once_a_second() -> None:
    kept, value = book(), Value()
    kept.enter("a", value, 0.0)
    assert not kept.is_due("a", value, 0.9)
    assert kept.is_due("a", value, 1.0)
    assert not kept.is_due("a", value, 1.9), "somebody is at it"
    assert not kept.is_due("a", Value(), 9.0)


def test_a_stream_whose_token_another_request_found_refused_is_verified_itself() -> None:
    kept, value = book(), Value()
    kept.enter("a", value, 0.0)
    kept.take("a", 0.0)
    assert kept.drop("a", value) == []
    assert kept.is_due("a", value, 1.0)


@given(st.lists(st.tuples(st.sampled_from(["take", "back", "drop", "expire"]), st.sampled_from("abcd")), max_size=60))
def test_any_sequence_keeps_the_bounds(steps: list[tuple[str, str]]) -> None:
    kept = book()
    used: list[tuple[str, Value]] = []
    open_values: set[Value] = set()
    for number, (what, name) in enumerate(steps):
        now_s, closing = number * 3.0, list[Value]()
        if what == "take":
            try:
                if kept.take(name, now_s) is None:
                    value = Value()
                    closing = kept.enter(name, value, now_s)
                    open_values.add(value)
                    assert kept.take(name, now_s) is value
                used.append((name, kept._entries[name].value))
            except Overloaded:
                assert len({each for each, _ in used}) >= 2
        elif what == "back" and used:
            closing = kept.give_back(*used.pop(0), now_s)
        elif what == "drop" and used:
            closing = kept.drop(*used[-1])
        elif what == "expire":
            closing = kept.expire(now_s)
        kept.check()
        assert not {id(value) for value in closing} & {id(value) for _, value in used}, "closed while in use"
        open_values -= set(closing)
        assert {value for _, value in used} <= open_values
    assert set(kept.clear()) == open_values, "each is closed once"


@given(st.integers(1, 30), st.integers(0, 40), st.integers(0, 40))
def test_a_range_is_what_a_slice_would_be(size: int, first: int, last: int) -> None:
    value = bytes(range(size))
    for header, expected in (
        (f"bytes={first}-{last}", value[first : last + 1]),
        (f"bytes={first}-", value[first:]),
        (f"bytes=-{last}", value[max(size - last, 0) :]),
    ):
        if not is_single_range(header):
            assert last < first
            continue
        try:
            part = part_of(header, size)
        except RangeNotSatisfiable:
            assert not expected
        else:
            assert value[part.offset : part.offset + part.length] == expected != b""


def test_bounds_come_back_to_nothing() -> None:
    bytes_ = InFlight("values", 10)
    with bytes_.holding_bytes(6):
        with pytest.raises(Overloaded, match="values"), bytes_.holding_bytes(5):
            raise AssertionError("there was no room")
        with bytes_.holding_bytes(4):
            bytes_.check()
    with bytes_.holding_bytes(11):
        assert bytes_.now == 11, "alone it has room"
    assert bytes_.now == 0


async def test_patterns_are_tried_elsewhere() -> None:
    keys = ["a/1", "b/1", "漢", "line\nend"]
    assert await matching("^a/|漢|end$", keys, 30.0) == ["a/1", "漢", "line\nend"]
    with pytest.raises(InvalidRequest, match="takes longer than 1 s"):
        await matching("^(a+)+$", ["a" * 80 + "!"], 1.0)
    with pytest.raises(InvalidRequest, match="not a regular expression"):
        await matching("(", [], 30.0)
    with pytest.raises(InvalidRequest, match="the limit is 4096"):
        await matching("x" * (MAX_PATTERN + 1), keys, 30.0)


async def test_the_process_that_tries_a_pattern_knows_no_secret_and_has_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = "raise re.error(repr((dict(os.environ), resource.getrlimit(resource.RLIMIT_CPU))))\n    found"
    code = matching_module._TRY.replace("found", shown, 1).replace("import json", "import os, json")
    monkeypatch.setattr(matching_module, "_TRY", code)
    monkeypatch.setenv("TANGHULU_TOKEN", "secret")
    with pytest.raises(InvalidRequest, match=r"\(32, 32\)") as refused:
        await matching("a", [], 30.0)
    assert "secret" not in refused.value.message


def test_what_comes_is_counted_as_it_comes() -> None:
    bytes_ = InFlight("values", 10)
    with bytes_.holding_what_comes() as first, bytes_.holding_what_comes() as second:
        first(6)
        second(4)
        with pytest.raises(Overloaded, match="values"):
            second(1)
        assert bytes_.now == 10
    assert bytes_.now == 0
    with bytes_.holding_what_comes() as alone:
        alone(6)
        alone(6)
        assert bytes_.now == 12
    bytes_.check()
