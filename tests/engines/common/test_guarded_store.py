"""The store as a cache: whatever it does is a miss, and one that does not answer is left alone. A store in memory."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

from tanghulu.engines.common.guarded_store import MAX_FAILED_QUESTIONS, GuardedStore
from tanghulu.errors import ChunkNotFound, DeadlineExceeded, InvalidRequest, MasterUnavailable, StoreFull, TanghuluError
from tanghulu.runtime.clock import ManualClock
from tanghulu.store.client.model import Status


class Chunks:
    """As much of the client as caches use; ``error`` is raised by every call, ``full`` refuses puts."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.error: TanghuluError | None = None
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

    def _into(self, key: str, buffer: bytearray) -> int | TanghuluError:
        value = self.kept.get(key)
        if value is None:
            return ChunkNotFound(key)
        if len(value) > len(buffer):
            return InvalidRequest(f"{key} is longer than its buffer")
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
def store(chunks: Chunks, clock: ManualClock) -> GuardedStore:
    return GuardedStore(chunks, load_deadline_s=5, save_deadline_s=10, clock=clock)


def test_what_was_written_is_found_and_read(store: GuardedStore, chunks: Chunks) -> None:
    assert store.write(["a", "b"], [b"aaaa", b"bbbb"]) == [True, True]
    assert store.has(["a", "x", "b"], 0.5) == [True, False, True]
    buffers = [bytearray(4) for _ in range(3)]
    assert store.read(["a", "x", "b"], buffers, [4, 4, 4]) == [True, False, True]
    assert [bytes(each) for each in buffers] == [b"aaaa", bytes(4), b"bbbb"]
    assert chunks.deadlines == [10, 0.5, 5]
    assert store.remove(["a", "x"]) == [True, False]
    assert store.remove_below("b")
    assert chunks.kept == {}


def test_a_full_store_is_an_answer(store: GuardedStore, chunks: Chunks) -> None:
    chunks.full = True
    for _ in range(5):
        assert store.write(["a"], [b"a"]) == [False]
    assert chunks.num_calls == 5
    assert store.counts["keys_not_saved"] == 5


def test_one_lost_transfer_closes_the_store_for_a_second(
    store: GuardedStore, chunks: Chunks, clock: ManualClock
) -> None:
    chunks.error = DeadlineExceeded("5 s")
    assert store.read(["a"], [bytearray(1)], [1]) == [False]
    assert store.write(["a"], [b"a"]) == [False]
    assert store.read(["a"], [bytearray(1)], [1]) == [False]
    assert chunks.num_calls == 1
    assert not store.is_open
    chunks.error = None
    clock.advance(1.0)
    assert store.write(["a"], [b"a"]) == [True]
    assert store.read(["a"], [bytearray(1)], [1]) == [True]


def test_some_lost_questions_close_it_too(store: GuardedStore, chunks: Chunks) -> None:
    chunks.error = MasterUnavailable("away")
    for _ in range(MAX_FAILED_QUESTIONS + 4):
        assert store.has(["a", "b"]) == [False, False]
    assert chunks.num_calls == MAX_FAILED_QUESTIONS
    assert store.remove(["a"]) == [False]
    assert not store.remove_below("a")


def test_only_keys_that_begin_with_the_prefix_are_removed(store: GuardedStore, chunks: Chunks) -> None:
    kept = ["axb/1", "x/a.b/1", "a.b"]
    store.write([*kept, "a.b/1", "a.b/2"], [b"value"] * 5)
    assert store.remove_below("a.b/")
    assert sorted(chunks.kept) == sorted(kept)


def test_nothing_costs_nothing(store: GuardedStore, chunks: Chunks) -> None:
    assert (store.has([]), store.read([], [], []), store.write([], [])) == ([], [], [])
    assert chunks.num_calls == 0
