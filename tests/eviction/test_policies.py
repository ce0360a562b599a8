"""The contract of every eviction policy, and what is particular to each."""

from __future__ import annotations

import random
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tanghulu.errors import InvalidRequest
from tanghulu.eviction import POLICIES, Policy, make_policy, simple
from tanghulu.types import ChunkKey
from tests.contracts.eviction import *  # noqa: F403 - all of the contract
from tests.contracts.eviction import KEYS


def contributors_example() -> Policy:
    """Mru of CONTRIBUTING.md, which tells how to add a policy."""
    page = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    code = re.search(r"```python\n(   class Mru.+?)```", page, re.DOTALL)
    assert code is not None
    names = dict(vars(simple))
    exec(textwrap.dedent(code[1]), names)
    policy: Policy = names["Mru"]()
    return policy


@pytest.fixture(params=[*sorted(POLICIES), contributors_example])
def policy(request: pytest.FixtureRequest) -> Iterator[Policy]:
    policy = request.param() if callable(request.param) else make_policy(request.param)
    yield policy
    policy.check()


def test_the_contributors_example_evicts_the_last_used() -> None:
    mru = contributors_example()
    for key in KEYS[:3]:
        mru.add(key, 1)
    mru.touch(KEYS[0])
    assert list(mru.victims()) == [KEYS[0], KEYS[2], KEYS[1]]


def test_lru_evicts_the_least_recently_used() -> None:
    lru = make_policy("lru")
    for key in KEYS[:4]:
        lru.add(key, 1)
    lru.touch(KEYS[0])
    assert list(lru.victims()) == [KEYS[1], KEYS[2], KEYS[3], KEYS[0]]


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(InvalidRequest, match="known: "):
        make_policy("belady")


def test_sieve_spares_what_was_read_until_the_hand_has_been_round() -> None:
    sieve = make_policy("sieve")
    a, b, c, d = KEYS[:4]
    for key in (a, b, c):
        sieve.add(key, 1)
    sieve.touch(a)
    assert list(sieve.victims()) == [b, c, a]
    sieve.remove(b, evicted=True)  # a has lost its mark; the hand stands at c
    sieve.add(d, 1)
    assert list(sieve.victims()) == [c, d, a]


class _PublishedSieve:
    """The paper's Algorithm 1, line by line, on a list from old to new; ``hand`` None stands for NULL."""

    def __init__(self) -> None:
        self.queue: list[ChunkKey] = []
        self.visited: dict[ChunkKey, bool] = {}
        self.hand: ChunkKey | None = None

    def evict(self) -> ChunkKey:
        at = self.queue.index(self.hand) if self.hand is not None else 0
        while self.visited[self.queue[at]]:
            self.visited[self.queue[at]] = False
            at = (at + 1) % len(self.queue)
        self.hand = self.queue[at + 1] if at + 1 < len(self.queue) else None
        victim = self.queue.pop(at)
        del self.visited[victim]
        return victim


@pytest.mark.parametrize(("seed", "slots"), [(0, 1), (1, 2), (2, 10), (3, 100)])
def test_sieve_evicts_what_the_published_algorithm_evicts(seed: int, slots: int) -> None:
    chance = random.Random(seed)
    sieve, published = make_policy("sieve"), _PublishedSieve()
    for step in range(5000):
        key = ChunkKey(str(int(chance.paretovariate(0.8)) + step // 20))  # hot keys that drift
        if sieve.touch(key):
            published.visited[key] = True
            continue
        if len(sieve) == slots:
            victim = next(sieve.victims())
            assert victim == published.evict(), step
            sieve.remove(victim, evicted=True)
        sieve.add(key, 1)
        published.queue.append(key)
        published.visited[key] = False
        sieve.check()


def test_s3_fifo_evicts_what_nobody_read_and_remembers_it() -> None:
    policy = make_policy("s3-fifo")
    for key in KEYS[:10]:
        policy.add(key, 1)
    policy.touch(KEYS[0])
    assert next(policy.victims()) == KEYS[1]
    policy.remove(KEYS[1], evicted=True)
    assert policy.num_ghosts == 1
    policy.add(KEYS[1], 1)  # comes back: into the main queue
    assert policy.num_ghosts == 0
    assert next(policy.victims()) == KEYS[2]
    assert list(policy.victims()).index(KEYS[1]) > list(policy.victims()).index(KEYS[8])


def test_lfu_counts_reads_and_breaks_ties_by_age() -> None:
    lfu = make_policy("lfu")
    for key in KEYS[:4]:
        lfu.add(key, 1)
    for key in (KEYS[0], KEYS[0], KEYS[2]):
        lfu.touch(key)
    assert list(lfu.victims()) == [KEYS[1], KEYS[3], KEYS[2], KEYS[0]]


def test_reuse_evicts_leaves_before_their_prefix() -> None:
    policy = make_policy("reuse")
    policy.begin_batch()
    for key in reversed(KEYS):
        policy.add(key, 1)
    policy.begin_batch()
    for left in range(len(KEYS), 0, -1):
        victim = next(policy.victims())
        assert victim == KEYS[left - 1]
        policy.remove(victim, evicted=True)
        policy.check()
