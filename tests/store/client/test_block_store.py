"""The store as a cache: whatever it does is a miss, and one that does not answer is left alone. A store in memory."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tanghulu.errors import (
    ChunkNotFound,
    DeadlineExceeded,
    DirectoryIncomplete,
    InvalidRequest,
    MasterUnavailable,
    NodeUnavailable,
    StoreFull,
    TanghuluError,
)
from tanghulu.store.client.block_store import KEYS_PER_CALL, MAX_FAILED_LOOKUPS, MAX_REST_S, BlockStore, Breaker
from tanghulu.store.client.model import Status
from tests.virtual.clock import ManualClock


class Chunks:
    """As much of the client as caches use; ``error`` is raised by every call, ``full`` refuses puts."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.errors: dict[str, TanghuluError] = {}
        self.error: BaseException | None = None
        self.full = False
        self.num_calls = 0
        self.deadlines: list[float | None] = []

    def _call(self, deadline_s: float | None) -> None:
        self.num_calls += 1
        self.deadlines.append(deadline_s)
        if self.error is not None:
            raise self.error

    def exists_many(self, keys: Sequence[str], *, deadline_s: float | None = None) -> list[bool]:
        self._call(deadline_s)
        return [key in self.kept for key in keys]

    def get_many_into(
        self, keys: Sequence[str], buffers: Sequence[Any], *, deadline_s: float | None = None
    ) -> list[int | TanghuluError]:
        self._call(deadline_s)
        return [self._into(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]

    def match_prefix(self, keys: Sequence[str], *, deadline_s: float | None = None) -> int:
        self._call(deadline_s)
        return next((at for at, key in enumerate(keys) if key not in self.kept), len(keys))

    def _into(self, key: str, buffer: bytearray) -> int | TanghuluError:
        value = self.kept.get(key)
        if key in self.errors:
            return self.errors[key]
        if value is None or len(value) != len(buffer):  # of another size: `KvClient` has removed it
            return ChunkNotFound(key)
        buffer[: len(value)] = value
        return len(value)

    def put_many(self, items: Any, *, deadline_s: float | None = None) -> list[Status]:
        self._call(deadline_s)
        if self.full:
            return [Status(key, error=StoreFull("full")) for key, _ in items]
        self.kept |= {key: bytes(value) for key, value in items if key not in self.kept}
        return [Status(key) for key, _ in items]

    def remove_many(self, keys: Sequence[str], *, deadline_s: float | None = None) -> list[bool]:
        self._call(deadline_s)
        return [self.kept.pop(key, None) is not None for key in keys]

    def remove_matching(self, pattern: str, *, deadline_s: float | None = None) -> int:
        self._call(deadline_s)
        gone = [key for key in self.kept if re.search(pattern, key)]
        for key in gone:
            del self.kept[key]
        return len(gone)

    def close(self) -> None: ...


@pytest.fixture
def chunks() -> Chunks:
    return Chunks()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(chunks: Chunks, clock: ManualClock) -> BlockStore:
    return BlockStore(chunks, load_deadline_s=5, save_deadline_s=10, clock=clock)


def whole(store: BlockStore, keys: Sequence[str], buffers: Sequence[bytearray]) -> list[bool]:
    return [error is None for error in store.load(keys, buffers)]


def test_what_was_written_is_found_and_read(store: BlockStore, chunks: Chunks) -> None:
    assert store.save(["a", "b"], [b"aaaa", b"bbbb"]) == [True, True]
    assert store.has(["a", "x", "b"], 0.5) == [True, False, True]
    assert store.num_leading(["a", "b", "x"], 0.5) == 2
    buffers = [bytearray(4) for _ in range(3)]
    assert whole(store, ["a", "x", "b"], buffers) == [True, False, True]
    assert [bytes(each) for each in buffers] == [b"aaaa", bytes(4), b"bbbb"]
    assert chunks.deadlines == [10, 0.5, 0.5, 5]
    assert store.remove(["a", "x"]) == [True, False]
    assert store.remove_below("b")
    assert chunks.kept == {}


def test_a_full_store_is_an_answer(store: BlockStore, chunks: Chunks) -> None:
    chunks.full = True
    for _ in range(5):
        assert store.save(["a"], [b"a"]) == [False]
    assert chunks.num_calls == 5
    assert store.counts["keys_not_saved"] == 5


def test_one_lost_transfer_closes_the_store_for_a_second(store: BlockStore, chunks: Chunks, clock: ManualClock) -> None:
    chunks.error = DeadlineExceeded("5 s")
    assert whole(store, ["a"], [bytearray(1)]) == [False]
    assert store.save(["a"], [b"a"]) == [False]
    assert whole(store, ["a"], [bytearray(1)]) == [False]
    assert chunks.num_calls == 1
    assert not store.is_healthy
    chunks.error = None
    clock.advance(1.0)
    assert store.save(["a"], [b"a"]) == [True]
    assert whole(store, ["a"], [bytearray(1)]) == [True]


def test_some_lost_lookups_close_it_too(store: BlockStore, chunks: Chunks) -> None:
    chunks.error = MasterUnavailable("away")
    for _ in range(MAX_FAILED_LOOKUPS + 4):
        assert store.has(["a", "b"]) == [False, False]
    assert chunks.num_calls == MAX_FAILED_LOOKUPS
    assert store.remove(["a"]) == [False]
    assert not store.remove_below("a")


@pytest.mark.parametrize(
    ("error", "leaves_alone"),
    [
        (NodeUnavailable("one node"), False),
        (InvalidRequest("too long"), False),
        (DeadlineExceeded("a node that stands still"), True),
        (MasterUnavailable("away"), True),
        (DirectoryIncomplete("rebuilding"), True),
    ],
)
def test_one_key_in_trouble_says_nothing_of_the_store(
    store: BlockStore, chunks: Chunks, error: TanghuluError, leaves_alone: bool
) -> None:
    """Unless every other key would wait as long; and if none has arrived, the store has not answered."""
    store.save(["a", "b"], [b"a", b"b"])
    chunks.errors = {"b": error}
    assert store.load(["a", "b"], [bytearray(1), bytearray(1)]) == [None, error]
    assert store.is_available is not leaves_alone
    if isinstance(error, NodeUnavailable):
        assert store.load(["b"], [bytearray(1)]) == [error]
        assert not store.is_available


def test_a_bug_does_not_keep_the_store_closed(store: BlockStore, chunks: Chunks, clock: ManualClock) -> None:
    chunks.error = DeadlineExceeded("5 s")
    store.save(["a"], [b"a"])
    clock.advance(1.0)
    chunks.error = RuntimeError("a programmer's error")
    with pytest.raises(RuntimeError):
        store.save(["a"], [b"a"])
    assert not store.is_available
    chunks.error = None
    clock.advance(2.0)
    assert store.is_available
    assert store.save(["a"], [b"a"]) == [True]


def test_transfers_of_many_keys_are_several_calls(store: BlockStore, chunks: Chunks, clock: ManualClock) -> None:
    keys = [f"{number}" for number in range(2 * KEYS_PER_CALL + 1)]
    assert all(store.save(keys, [key.encode() for key in keys]))
    buffers = [bytearray(len(key)) for key in keys]
    assert store.load(keys, buffers, clock.now_s() + 2.0) == [None] * len(keys)
    assert buffers == [key.encode() for key in keys]
    assert chunks.deadlines == [10] * 3 + [2.0] * 3
    assert not any(error is None for error in store.load(keys, buffers, clock.now_s()))
    assert chunks.num_calls == 6, "there was no time left"


def test_only_keys_that_begin_with_the_prefix_are_removed(store: BlockStore, chunks: Chunks) -> None:
    kept = ["axb/1", "x/a.b/1", "a.b"]
    store.save([*kept, "a.b/1", "a.b/2"], [b"value"] * 5)
    assert store.remove_below("a.b/")
    assert sorted(chunks.kept) == sorted(kept)


def test_nothing_costs_nothing(store: BlockStore, chunks: Chunks) -> None:
    assert (store.has([]), store.load([], []), store.save([], []), store.num_leading([], 1.0)) == ([], [], [], 0)
    assert chunks.num_calls == 0


def test_rests_grow_until_a_call_is_answered(clock: ManualClock) -> None:
    breaker = Breaker(3, clock)
    assert [breaker.failed() for _ in range(3)] == [False, False, True]
    allowed = []
    for step_s in (0.0, 0.99, 0.01, 0.0):
        clock.advance(step_s)
        allowed.append(breaker.allows())
    assert allowed == [False, False, True, False]
    breaker.failed()
    clock.advance(1.9)
    assert not breaker.allows()
    clock.advance(0.11)
    assert breaker.allows()
    breaker.succeeded()
    assert all(breaker.allows() for _ in range(5))


@given(st.lists(st.tuples(st.floats(0, 40), st.booleans()), max_size=40))
def test_a_rest_ends(calls: list[tuple[float, bool]]) -> None:
    clock = ManualClock()
    breaker = Breaker(2, clock)
    for passed_s, answered in calls:
        clock.advance(passed_s)
        if breaker.allows():
            if answered:
                breaker.succeeded()
            else:
                breaker.failed()
        breaker.check()
    clock.advance(MAX_REST_S)
    assert breaker.would_allow
    assert breaker.allows()
