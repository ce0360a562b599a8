"""Loads and saves in threads: whatever the store does, each ends, and says which blocks it lost. A store in memory."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tanghulu.engines.common.options import ConnectorOptions
from tanghulu.engines.common.requests import Block, LoadJob, SaveJob
from tanghulu.engines.common.transfers import ANSWER_S, Ended, HostMemory, PrefixLookup, Transfers
from tanghulu.errors import (
    ChunkNotFound,
    ConfigError,
    DeadlineExceeded,
    MasterUnavailable,
    TanghuluError,
)
from tanghulu.store.client.block_store import BlockStore
from tanghulu.store.client.model import Status
from tests.virtual.clock import ManualClock

LAYERS, LAYER_BYTES, NUM_BLOCKS = 3, 4, 8
BLOCK_BYTES = LAYERS * LAYER_BYTES
OPTIONS = ConnectorOptions(master="127.0.0.1:1")


class MemoryStore:
    """As much of the client as connectors use; ``error`` is raised by every call."""

    def __init__(self) -> None:
        self.chunks: dict[str, bytes] = {}
        self.error: BaseException | None = None
        self.num_calls = 0

    def _call(self) -> None:
        self.num_calls += 1
        if self.error is not None:
            raise self.error

    def match_prefix(self, keys: Any, *, deadline_s: float | None = None) -> int:
        self._call()
        return next((at for at, key in enumerate(keys) if key not in self.chunks), len(keys))

    def get_many_into(self, keys: Any, buffers: Any, *, deadline_s: float | None = None) -> list[int | TanghuluError]:
        self._call()
        found: list[int | TanghuluError] = []
        for key, pieces in zip(keys, buffers, strict=True):
            value = self.chunks.get(key)
            if value is None or len(value) != BLOCK_BYTES:  # of another size: `KvClient` has removed it
                found.append(ChunkNotFound(key))
                continue
            for at, piece in enumerate(pieces):
                part = value[at * LAYER_BYTES : (at + 1) * LAYER_BYTES]
                piece[: len(part)] = part
            found.append(len(value))
        return found

    def put_many(self, items: Any, *, deadline_s: float | None = None) -> list[Status]:
        self._call()
        for key, value in items:
            self.chunks.setdefault(key, b"".join(value))
        return [Status(key) for key, _ in items]

    def close(self) -> None:
        pass


class Rank:
    """A cache of a few blocks, its transfers, and what ended."""

    def __init__(self, store: MemoryStore) -> None:
        self.layers = [bytearray(NUM_BLOCKS * LAYER_BYTES) for _ in range(LAYERS)]
        self.clock = ManualClock()
        memory = HostMemory(lambda hashes: [each.hex() for each in hashes], self.buffers)
        self.transfers = Transfers(BlockStore(store, clock=self.clock), memory, OPTIONS, self.clock)
        self.computed = memory.mark()

    def buffers(self, block_id: int) -> list[memoryview]:
        at = slice(block_id * LAYER_BYTES, (block_id + 1) * LAYER_BYTES)
        return [memoryview(layer)[at] for layer in self.layers]

    def wait(self, num_loads: int = 0, num_saves: int = 0) -> Ended:
        ended, pause = Ended(), threading.Event()
        while len(ended.loaded) < num_loads or ended.saved.total() < num_saves:
            more = self.transfers.take_ended()
            ended.loaded |= more.loaded
            ended.bad_block_ids |= more.bad_block_ids
            ended.saved.update(more.saved)
            pause.wait(0.001)
        return ended


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def rank(store: MemoryStore) -> Iterator[Rank]:
    made = Rank(store)
    yield made
    made.transfers.close()


def blocks(*ids: int) -> tuple[Block, ...]:
    return tuple(Block(bytes([at]), block_id) for at, block_id in enumerate(ids))


def save_three(rank: Rank) -> None:
    for at, layer in enumerate(rank.layers):
        layer[:] = bytes(range(at * 50, at * 50 + len(layer)))
    rank.transfers.save(SaveJob(0, blocks(1, 2, 3)), rank.computed)
    assert rank.wait(num_saves=1).saved == {0: 1}


def test_what_was_saved_is_loaded_into_other_blocks(store, rank):
    save_three(rank)
    rank.transfers.load(LoadJob("r", blocks(5, 6, 7)), rank.computed)
    ended = rank.wait(num_loads=1)
    assert (ended.loaded, ended.bad_block_ids) == ({"r"}, set())
    for layer in rank.layers:
        assert layer[5 * LAYER_BYTES :] == layer[LAYER_BYTES : 4 * LAYER_BYTES]


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_blocks_behind_a_lost_one_are_lost(store, rank, lost):
    save_three(rank)
    del store.chunks[bytes([lost]).hex()]
    rank.transfers.load(LoadJob("r", blocks(5, 6, 7)), rank.computed)
    ended = rank.wait(num_loads=1)
    assert (ended.loaded, ended.bad_block_ids) == ({"r"}, set(range(5 + lost, 8)))


def test_a_block_of_another_size_is_lost(store, rank):
    save_three(rank)
    store.chunks[bytes([1]).hex()] = b"short"
    rank.transfers.load(LoadJob("r", blocks(5, 6, 7)), rank.computed)
    assert rank.wait(num_loads=1).bad_block_ids == {6, 7}


@pytest.mark.parametrize("error", [DeadlineExceeded("late"), RuntimeError("a bug")])
def test_every_transfer_ends_whatever_happens(store, rank, error):
    store.error = error
    rank.transfers.load(LoadJob("r", blocks(5, 6)), rank.computed)
    rank.transfers.save(SaveJob(3, blocks(1, 2)), rank.computed)
    ended = rank.wait(num_loads=1, num_saves=1)
    assert (ended.loaded, ended.bad_block_ids, ended.saved) == ({"r"}, {5, 6}, {3: 1})
    rank.transfers.close()
    rank.transfers.load(LoadJob("s", blocks(5)), rank.computed)
    assert rank.wait(num_loads=1).bad_block_ids == {5}


def test_an_engine_without_work_waits_for_the_first_end(store, rank):
    for_ever_s = threading.TIMEOUT_MAX
    assert rank.transfers.take_ended(for_ever_s) == Ended(), "nothing is under way"
    rank.transfers.save(SaveJob(0, blocks(1, 2, 3)), rank.computed)
    assert rank.transfers.take_ended(for_ever_s).saved == {0: 1}
    rank.transfers.load(LoadJob("r", blocks(5, 6, 7)), rank.computed)
    assert rank.transfers.take_ended(for_ever_s).loaded == {"r"}
    assert rank.transfers.take_ended(for_ever_s) == Ended(), "each was told"


def test_what_had_not_begun_when_it_closes_ends_too(store, rank):
    begun, may_end = threading.Event(), threading.Event()

    def slow(items: Any, *, deadline_s: float | None = None) -> list[Status]:
        begun.set()
        may_end.wait(30)
        return []

    store.put_many = slow
    for number in range(3):
        rank.transfers.save(SaveJob(number, blocks(1)), rank.computed)
    assert begun.wait(30)
    rank.transfers.close()
    may_end.set()
    assert rank.wait(num_saves=3).saved == {0: 1, 1: 1, 2: 1}


def test_a_store_that_was_late_is_left_alone_for_a_moment(store, rank):
    save_three(rank)
    store.error = DeadlineExceeded("late")
    rank.transfers.load(LoadJob("r", blocks(5)), rank.computed)
    rank.wait(num_loads=1)
    store.error, num_calls = None, store.num_calls
    rank.transfers.load(LoadJob("r", blocks(5)), rank.computed)
    assert rank.wait(num_loads=1).bad_block_ids == {5}
    assert store.num_calls == num_calls
    rank.clock.advance(1.0)
    rank.transfers.load(LoadJob("r", blocks(5)), rank.computed)
    assert rank.wait(num_loads=1).bad_block_ids == set()


def test_one_question_serves_a_waiting_request(store):
    clock = ManualClock()
    blocks_there = BlockStore(store, clock=clock)
    lookup = PrefixLookup(blocks_there, 0.02, clock)
    store.chunks["a"] = b"x"
    assert [lookup.num_stored("r", ["a", "b"]) for _ in range(5)] == [1] * 5
    assert store.num_calls == 1
    store.error = MasterUnavailable("away")
    assert [lookup.num_stored(f"r{number}", ["a"]) for number in range(9)] == [0] * 9
    assert blocks_there.counts["lookups_failed"] == 3
    store.error = None
    clock.advance(1.0)
    assert lookup.num_stored("r", ["a", "b"]) == 1


def test_answers_are_kept_for_a_moment(store):
    clock = ManualClock()
    lookup = PrefixLookup(BlockStore(store, clock=clock), 0.02, clock)
    store.chunks |= dict.fromkeys("abc", b"x")
    assert lookup.num_stored("r", list("abcde")) == 3
    store.chunks["d"] = b"x"
    clock.advance(ANSWER_S / 2)
    assert lookup.num_stored("r", list("abcde")) == 3
    assert lookup.num_stored("r", list("abcdef")) == 4, "it has more blocks by now"
    store.chunks["e"] = b"x"
    clock.advance(ANSWER_S)
    assert lookup.num_stored("r", list("abcdef")) == 5
    lookup.forget("r")
    assert len(lookup) == 0


def test_options_name_what_is_wrong():
    assert ConnectorOptions.parse({"master": "h:1", "save_pending_bytes": "1MiB"}).max_pending_bytes == 1 << 20
    for values, message in [
        ({}, 'has no "master"'),
        ({"master": "h:1", "mastre": 1}, "unknown option 'mastre'"),
        ({"master": "h:1", "save": "some"}, "known: all, prompt, none"),
        ({"master": "h:1", "threads": 0}, "threads=0 is not within 1 to"),
        ({"master": "h:1", "threads": 2.5}, r"threads=2\.5 is not a whole number"),
        ({"master": "h:1", "threads": "2"}, "threads='2' is not a whole number"),
        ({"master": "h:1", "min_blocks": None}, "min_blocks=None is not a whole number"),
        ({"master": "h:1", "load_deadline_s": "5"}, "load_deadline_s='5' is not a number"),
        ({"master": "h:1", "save_deadline_s": math.inf}, "save_deadline_s=inf must be more than 0 and at most"),
        ({"master": "h:1", "lookup_deadline_ms": math.nan}, "lookup_deadline_ms=nan must be more than 0"),
        ({"master": "h:1", "save_pending_bytes": -5}, "save_pending_bytes=-5 is not within 0 to"),
        ({"master": "h:1", "save_pending_bytes": None}, "save_pending_bytes=None is not a whole number"),
        ({"master": "h:1", "namespace": None}, "namespace=None is not a str"),
        ({"master": "h:1", "token": 5}, "token is not a str"),
        ({"master": ["h:1"]}, "master=.* is not a str"),
        ({"master": "h:1;h:2"}, "is not a host"),
        ({"master": "h:1", "save_pending_bytes": "much"}, "save_pending_bytes"),
    ]:
        with pytest.raises(ConfigError, match=message):
            ConnectorOptions.parse(values)
