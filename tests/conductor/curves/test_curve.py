"""Curves against exhaustive simulation: equal with all blocks, close with a sample; and their parts one by one."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from tanghulu.conductor.curves.caches import Miniature, optimal_hits
from tanghulu.conductor.curves.curve import MAX_TENANTS, OTHERS, SIZES, Bounds, ModelCurve, spread
from tanghulu.conductor.curves.distances import WORD, StackDistances
from tanghulu.eviction import POLICIES, make_policy

#: Tokens of a block; a prompt has half a block more than its names.
SIZE = 64
ALL = Bounds(1 << 30, 1 << 30, 1 << 30)
Chains = list[list[int]]


def chats(num_requests: int, seed: int = 1) -> Chains:
    """Chats that share three system prompts and grow by turns; some end, new ones begin."""
    draw, found, open_chats = random.Random(seed), [], list[list[int]]()
    fresh = itertools.count(1000)
    for _ in range(num_requests):
        if not open_chats or draw.random() < 0.3:
            system = min(2, int(draw.expovariate(1)))
            open_chats.append([100 * system + i for i in range(6)])
        chat = draw.choice(open_chats[-60:])
        chat += [next(fresh) for _ in range(draw.randint(1, 9))]
        found.append(list(chat))
        if len(chat) > 60:
            open_chats.remove(chat)
    return found


def exhaustive(chains: Chains, policy: str, capacity: int) -> float:
    """The share of prompt tokens that a cache of all blocks has."""
    if policy == "optimum":
        hits: Sequence[int] = optimal_hits(chains, capacity)
    else:
        cache = Miniature(make_policy(policy), capacity)
        hits = [cache.request(chain) for chain in chains]
    return SIZE * sum(hits) / sum(SIZE * len(chain) + SIZE // 2 for chain in chains)


def drawn(chains: Chains, policy: str, memory: float, bounds: Bounds = ALL) -> ModelCurve:
    curve = ModelCurve(policy, memory, bounds)
    for number, chain in enumerate(chains):
        curve.add("", spread(chain), SIZE * len(chain) + SIZE // 2, len(chain), SIZE)
        if number % 500 == 0:
            curve.check()
    curve.check()
    return curve


@pytest.mark.parametrize("policy", POLICIES)
def test_with_all_blocks_a_curve_is_exact(policy: str) -> None:
    chains, memory = chats(80), 60
    curve = drawn(chains, policy, memory)
    assert curve.rate == 1
    shares = curve.curves()["*"].shares
    assert shares.keys() == {"lru", policy, "optimum"}
    for name, found in shares.items():
        wanted = [exhaustive(chains, name, round(size * memory)) for size in SIZES]
        assert found == pytest.approx(wanted, abs=0.003), name


@pytest.mark.parametrize("policy", ["fifo", "s3-fifo"])
def test_a_sample_is_within_two_points(policy: str) -> None:
    chains, memory = chats(500), 1000
    curve = drawn(chains, policy, memory, Bounds(1000, 500, 1 << 20))
    assert curve.rate < 0.6
    for name, found in curve.curves()["*"].shares.items():
        for size, share in zip(SIZES[2::4], found[2::4], strict=True):
            assert share == pytest.approx(exhaustive(chains, name, round(size * memory)), abs=0.02), (name, size)


def test_the_optimum_of_recent_uses_never_loses_to_lru() -> None:
    curve = drawn(chats(800), "lru", 200, Bounds(1 << 30, 1 << 30, 4000))
    shares = curve.curves()["*"].shares
    assert all(best >= lru - 0.005 for best, lru in zip(shares["optimum"], shares["lru"], strict=True))


def test_the_optimum_of_a_thinned_sample_is_close() -> None:
    """Many requests of some blocks, not few of all: a window would miss what comes back after it."""
    chains, memory = chats(1000), 1000
    curve = drawn(chains, "lru", memory, Bounds(1 << 30, 1 << 30, 9000))
    found = curve.curves()["*"].shares["optimum"]
    for size, share in zip(SIZES[::2], found[::2], strict=True):
        assert share == pytest.approx(exhaustive(chains, "optimum", round(size * memory)), abs=0.02), size


def test_work_is_bounded() -> None:
    curve = drawn(chats(1000), "lru", 1000, Bounds(1 << 30, 1 << 30, 1 << 30, 2.0))
    assert curve.rate < 0.15


def test_tenants_share_the_memory_and_have_curves_of_their_own() -> None:
    curve = ModelCurve("lru", 30, ALL)
    for _ in range(3):
        for tenant in range(MAX_TENANTS + 5):
            names = spread([1000 * tenant + i for i in range(10 if tenant else 0)])
            curve.add(f"t{tenant}", names, 10 * SIZE + 1, len(names), SIZE)
    found = curve.curves()
    assert len(found) == MAX_TENANTS + 2
    assert found[OTHERS].num_requests == 15
    assert found["t0"].shares["lru"] == [0] * len(SIZES)
    assert found["t1"].shares["lru"][0] == 0, "others have evicted it"
    assert found["t1"].shares["lru"][-1] == 0
    curve.resize(40)
    assert curve.curves()["t1"].shares["lru"][-1] == pytest.approx(2 / 3, abs=0.01)
    before = curve.curves()["*"].shares
    curve.fade(0.5)
    assert curve.curves()["*"].shares["lru"] == pytest.approx(before["lru"])


def test_blocks_of_answers_hit_later_and_count_for_nothing() -> None:
    curve = ModelCurve("fifo", 100, ALL)
    curve.add("", spread([1, 2, 3]), 2 * SIZE + 1, 2, SIZE)
    curve.add("", spread([1, 2, 3, 4]), 4 * SIZE + 1, 4, SIZE)
    shares = curve.curves()["*"].shares
    assert all(each[-1] == pytest.approx(3 * SIZE / (6 * SIZE + 2)) for each in shares.values())


def test_without_memory_or_requests() -> None:
    assert ModelCurve("reuse", 0, ALL).curves()["*"].shares["optimum"] == [0] * len(SIZES)
    curve = drawn(chats(20), "reuse", 0)
    curve.resize(50)
    assert curve.curves()["*"].shares["lru"][-1] > 0.3


def test_distances_are_those_of_a_list() -> None:
    draw, stack, plain = random.Random(3), StackDistances(), list[int]()
    for _ in range(6 * WORD):
        block = int(draw.expovariate(0.01))
        assert stack.distance(block) == (plain.index(block) if block in plain else None)
        stack.use(block)
        plain = [block, *(each for each in plain if each != block)]
    stack.check()
    stack.keep(50, lambda block: block % 2 == 0)
    stack.check()
    assert [each for each in range(1000) if stack.distance(each) is not None] == sorted(
        each for each in plain[:50] if each % 2 == 0
    )


def test_nothing_beats_the_optimum() -> None:
    """All ways to keep two blocks of short chains, tried one by one."""
    for seed in range(20):
        draw = random.Random(seed)
        chains = [[draw.randrange(2), *([2 + draw.randrange(3)] * draw.randrange(2))] for _ in range(6)]
        chains = [chain if len(chain) < 2 else [chain[0], 10 * chain[0] + chain[1]] for chain in chains]
        assert sum(optimal_hits(chains, 2)) == _most(chains, frozenset(), 2)


def _most(chains: Chains, kept: frozenset[int], capacity: int) -> int:
    if not chains:
        return 0
    chain, rest = chains[0], chains[1:]
    hits = next((i for i, block in enumerate(chain) if block not in kept), len(chain))
    there = kept | set(chain)
    options = itertools.combinations(sorted(there), min(capacity, len(there)))
    return hits + max(_most(rest, frozenset(each), capacity) for each in options)
