"""The block pool: its contract by examples, then random histories against a plain model of it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tanghulu.eviction.policies import POLICIES
from tanghulu.types import BlockHash
from tanghulu.workers.engine.block_pool import BlockPool, KvEvent, KvEventKind


def h(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "little"))


def committed(pool: BlockPool, *numbers: int) -> list[int]:
    blocks = pool.allocate(len(numbers))
    assert blocks is not None
    for block, number in zip(blocks, numbers, strict=True):
        assert pool.commit(block, h(number))
    pool.check()
    return blocks


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(3)
    assert pool.allocate(4) is None
    assert pool.num_free == 3
    blocks = pool.allocate(3)
    assert blocks is not None
    assert sorted(blocks) == [0, 1, 2]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []
    pool.release(blocks)
    assert pool.num_free == 3
    pool.check()


def test_match_finds_the_longest_leading_run_and_shares_it() -> None:
    pool = BlockPool(4)
    blocks = committed(pool, 1, 2, 3)
    assert pool.match([h(1), h(2), h(9), h(3)]) == blocks[:2]
    assert pool.num_references(blocks[0]) == 2
    pool.release(blocks)
    assert pool.num_cached == 1
    assert pool.num_in_use == 2
    assert pool.num_hits([h(1), h(2), h(3), h(4)]) == 3
    pool.release(blocks[:2])
    assert pool.num_cached == 3
    pool.check()


def test_leaves_are_evicted_before_the_prefix_they_stand_on() -> None:
    pool = BlockPool(3)
    blocks = committed(pool, 1, 2, 3)
    pool.release(blocks)
    pool.take_events()
    assert pool.allocate(1) == [blocks[2]]
    assert pool.take_events() == [KvEvent(KvEventKind.REMOVED, h(3))]
    assert pool.num_hits([h(1), h(2), h(3)]) == 2


def test_a_hit_makes_recent() -> None:
    pool = BlockPool(2)
    first, second = committed(pool, 1)[0], committed(pool, 2)[0]
    pool.release([first])
    pool.release([second])
    pool.release(pool.match([h(1)]))
    assert pool.allocate(1) == [second]


def test_a_second_block_with_the_same_hash_stays_private() -> None:
    pool = BlockPool(2)
    (first,) = committed(pool, 1)
    twin = pool.allocate(1)
    assert twin is not None
    pool.take_events()
    assert not pool.commit(twin[0], h(1))
    assert pool.commit(first, h(1)), "again is fine"
    assert pool.take_events() == []
    pool.release(twin)
    assert pool.num_free == 1
    pool.check()


def test_a_block_in_transfer_belongs_to_the_transfer() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.begin_transfer(blocks[:1])
    pool.check()
    assert (pool.num_in_use, pool.num_in_transfer) == (2, 1)
    with pytest.raises(AssertionError, match="still being written"):
        pool.commit(blocks[0], h(1))
    pool.end_transfer(blocks[:1])
    assert pool.commit(blocks[0], h(1))
    with pytest.raises(AssertionError, match="is committed"):
        pool.begin_transfer(blocks[:1])


def test_dropping_spares_what_is_in_use() -> None:
    pool = BlockPool(4)
    kept, gone = committed(pool, 1, 2), committed(pool, 3, 4)
    pool.release(gone)
    pool.take_events()
    assert pool.drop_cached() == 2
    assert {event.block_hash for event in pool.take_events()} == {h(3), h(4)}
    assert pool.num_hits([h(1), h(2)]) == 2
    assert set(pool.matchable_hashes()) == {h(1), h(2)}
    pool.release(kept)
    pool.check()


def test_releasing_too_often_is_a_bug() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(AssertionError, match="more often"):
        pool.release(blocks)


def test_a_transfer_that_read_a_block_has_not_used_it() -> None:
    pool = BlockPool(2, "lru")
    first, second = committed(pool, 1), committed(pool, 2)
    pool.release(first)
    pool.release(second)
    pool.retain(first)
    pool.release(first, used=False)
    assert pool.allocate(1) == first
    pool.check()


@pytest.mark.parametrize("eviction", sorted(POLICIES))
def test_copies_go_first_until_a_request_computes_with_them(eviction: str) -> None:
    pool = BlockPool(4, eviction)
    own, copied = committed(pool, 1, 2), committed(pool, 11, 12)
    pool.release(own)
    pool.release(copied, copied=True)
    assert pool.allocate(1) == copied[1:], "the tail of the copy, though it was used last"
    pool.release(pool.match([h(11)]), copied=True)
    assert pool.num_cached == 3, "used by another hand-over, it is still a copy"
    pool.check()
    pool.release(pool.match([h(11)]))
    assert pool.allocate(1) != copied[:1]
    pool.check()


def test_a_block_that_a_request_used_beside_a_copy_is_no_copy() -> None:
    for copy_ends_first in (True, False):
        pool = BlockPool(2, "lru")
        block = committed(pool, 1)
        pool.retain(block)
        for copied in (copy_ends_first, not copy_ends_first):
            pool.release(block, copied=copied)
        other = committed(pool, 2)
        pool.release(other, copied=True)
        assert pool.allocate(1) == other
        pool.check()


def _share_found(eviction: str, seed: int) -> float:
    """Of 200 prompts, each one of 16 prefixes of 115 blocks with a tail of 13 of its own, four at a time."""
    rng, pool = random.Random(seed), BlockPool(2048, eviction)
    running: list[list[int]] = []
    num_hits = 0
    for number in range(200):
        if len(running) == 4:
            pool.release(running.pop(0))
        group = rng.randrange(16)
        hashes = [h((group + 1) << 32 | i) for i in range(115)] + [h((number + 99) << 32 | i) for i in range(13)]
        hits = pool.match(hashes)
        fresh = pool.allocate(len(hashes) - len(hits))
        assert fresh is not None
        for block, block_hash in zip(fresh, hashes[len(hits) :], strict=True):
            pool.commit(block, block_hash)
        running.append(hits + fresh)
        num_hits += len(hits)
    pool.check()
    return num_hits / (200 * 128)


def test_what_comes_again_outlives_what_does_not() -> None:
    learned = [_share_found("reuse", seed) for seed in range(3)]
    aged = [_share_found("lru", seed) for seed in range(3)]
    assert sum(learned) / 3 > sum(aged) / 3 + 0.02


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 12), st.integers(0, 2**32), st.sampled_from(sorted(POLICIES)))
def test_random_histories(num_blocks: int, seed: int, eviction: str) -> None:
    """Prompts out of a small tree come and go; events replayed always give the index."""
    rng, pool = random.Random(seed), BlockPool(num_blocks, eviction)
    live: list[list[int]] = []
    mirror: set[BlockHash] = set()
    for _ in range(60):
        if live and rng.random() < 0.45:
            pool.release(live.pop(rng.randrange(len(live))), copied=rng.random() < 0.3)
        elif rng.random() < 0.05:
            pool.drop_cached()
        else:
            _start_prompt(rng, pool, live)
        for event in pool.take_events():
            assert (event.block_hash in mirror) is (event.kind is KvEventKind.REMOVED)
            mirror ^= {event.block_hash}
        assert mirror == set(pool.matchable_hashes())
        pool.check()
    for blocks in live:
        pool.release(blocks)
    assert pool.num_in_use == 0


def _start_prompt(rng: random.Random, pool: BlockPool, live: list[list[int]]) -> None:
    path, hashes = 1, []
    for _ in range(rng.randint(1, 5)):
        path = 2 * path + rng.randrange(2)
        hashes.append(h(path))
    hits = pool.match(hashes)
    assert len(hits) <= len(hashes)
    fresh = pool.allocate(len(hashes) - len(hits))
    if fresh is None:
        pool.release(hits)
        return
    if fresh and rng.random() < 0.3:
        pool.begin_transfer(fresh)
        assert pool.num_in_transfer == len(fresh)
        pool.check()
        pool.end_transfer(fresh)
    for block, block_hash in zip(fresh, hashes[len(hits) :], strict=True):
        pool.commit(block, block_hash)
    live.append(hits + fresh)
