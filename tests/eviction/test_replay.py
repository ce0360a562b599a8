"""Policies behind a small cache on traces made by seed, where it is known who must win."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from benchmarks.store import eviction
from tanghulu.eviction import POLICIES, make_policy
from tanghulu.eviction.reuse_times import NUM_BINS, ReuseTimes, bin_of, first_age
from tanghulu.types import ChunkKey


def chain(name: str, length: int) -> list[ChunkKey]:
    return [ChunkKey(f"{name}/{i}") for i in range(length)]


def zipf_chains(seed: int, num_requests: int = 3000) -> list[list[ChunkKey]]:
    """Prompts of 1 to 12 blocks; 200 chains, the n-th asked for in proportion to 1 / n."""
    rng = random.Random(seed)
    weights = [1 / (n + 1) for n in range(200)]
    picks = rng.choices(range(200), weights, k=num_requests)
    return [chain(f"c{pick}", rng.randint(1, 12)) for pick in picks]


def with_scans(seed: int) -> list[list[ChunkKey]]:
    """Each prompt out of 20 popular ones, in a pause of which four prompts come that nobody repeats."""
    rng = random.Random(seed)
    requests = []
    for i in range(1500):
        requests.append(chain(f"hot{rng.randrange(20)}", 4))
        requests += [chain(f"once{i}-{j}", 8) for j in range(4)]
    return requests


def chats(seed: int, num_chats: int = 2500) -> list[list[ChunkKey]]:
    """Chats of up to eight turns of four blocks; one in four goes on after the first turn, nine in ten of those later.

    The next turn comes 40 to 80 requests later, so under LRU a chunk waits for about 60 prompts.
    """
    rng = random.Random(seed)
    due: list[tuple[int, int, int]] = []
    for number in range(num_chats):
        when, turns = number * 3, 1
        while turns < 8 and rng.random() < (0.25 if turns == 1 else 0.9):
            turns += 1
        for turn in range(turns):
            due.append((when, number, turn))
            when += rng.randint(120, 240)
    return [chain(f"chat{number}", 4 * (turn + 1)) for _, number, turn in sorted(due)]


def ratio(requests: list[list[ChunkKey]], name: str, capacity: int) -> float:
    return float(eviction.replay(requests, make_policy(name), capacity).hit_ratio)


@pytest.mark.parametrize("capacity", [7, 50, 300])
def test_lru_behind_the_driver_is_a_plain_ordered_dictionary(capacity: int) -> None:
    driver = eviction.CacheDriver(make_policy("lru"), capacity)
    model: OrderedDict[ChunkKey, None] = OrderedDict()
    for keys in zipf_chains(1):
        expected = next((i for i, key in enumerate(keys) if key not in model), len(keys))
        for key in reversed(keys):
            if key not in model and len(model) == capacity:
                model.popitem(last=False)
            model[key] = None
            model.move_to_end(key)
        assert driver.request(keys) == expected
        assert list(driver.policy.victims()) == list(model)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_cache_that_holds_everything_makes_all_policies_equal(name: str) -> None:
    requests = zipf_chains(2, 500)
    assert ratio(requests, name, 10_000) == ratio(requests, "lru", 10_000)


def test_replays_are_deterministic() -> None:
    requests = zipf_chains(3, 1000)
    for name in POLICIES:
        assert ratio(requests, name, 60) == ratio(requests, name, 60)


def test_scans_flush_lru_and_fifo_but_not_the_others() -> None:
    hits = {name: ratio(with_scans(4), name, 160) for name in POLICIES}
    best = 4 / 36  # the popular prompts' share of all blocks
    for name in ("sieve", "s3-fifo", "lfu", "reuse"):
        assert hits[name] > 0.7 * best, hits
        assert hits[name] > 1.3 * max(hits["lru"], hits["fifo"]), hits


def test_reads_help_lru_over_fifo() -> None:
    requests = zipf_chains(5)
    assert ratio(requests, "lru", 100) > ratio(requests, "fifo", 100)


def test_reuse_learns_which_chats_go_on() -> None:
    requests = chats(6)
    assert ratio(requests, "reuse", 300) > 1.25 * ratio(requests, "lru", 300)


@pytest.mark.parametrize("capacity", [20, 80, 250, 600])
@pytest.mark.parametrize("make", [zipf_chains, with_scans, chats])
def test_reuse_is_hardly_anywhere_below_lru(make: object, capacity: int) -> None:
    assert callable(make)
    requests = make(7)
    assert ratio(requests, "reuse", capacity) > ratio(requests, "lru", capacity) - 0.01


def test_reuse_falls_back_to_lru_when_the_past_misleads() -> None:
    """What was read often is never read again, what is new comes back at once: the opposite of what was learned."""
    requests = [chain(f"hot{i % 30}", 4) for i in range(3000)]
    for i in range(12_000):
        requests.append(chain(f"new{i}", 4))
        if i >= 20:
            requests.append(chain(f"new{i - 20}", 4))
    reuse, lru = (ratio(requests, name, 130) for name in ("reuse", "lru"))
    assert reuse > lru - 0.02


# --- reuse times


def test_bins_cover_all_ages_without_gaps() -> None:
    assert bin_of(0) == 0
    for index in range(1, NUM_BINS):
        assert bin_of(first_age(index)) == index
        assert bin_of(first_age(index) - 1) == index - 1
    assert bin_of(1 << 60) == NUM_BINS - 1


def test_ranks_rise_towards_the_age_of_reuse_and_fall_behind_it() -> None:
    times = ReuseTimes(2)
    for _ in range(100):
        times.entered(0, 1)
        times.entered(1, 1)
    for _ in range(50):
        times.reused(0, 1000)
    times.fit()
    young, due, late = (times.ranks[0][bin_of(age)] for age in (0, 1000, 2000))
    assert late < young < due
    assert max(times.ranks[1]) < young
