"""What every eviction policy keeps to; a test module has the fixture ``policy``, a policy that it checks at the end."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tanghulu.eviction import POLICIES, Policy, make_policy
from tanghulu.types import ChunkKey

STEPS = ["add", "touch", "remove", "evict", "batch"]
KEYS = [ChunkKey(f"k{i}") for i in range(12)]


def test_victims_are_exactly_the_keys_that_are_in(policy: Policy) -> None:
    for key in KEYS:
        policy.add(key, 100)
    assert policy.touch(KEYS[3])
    assert not policy.touch(ChunkKey("unknown"))
    policy.remove(KEYS[5], evicted=False)
    policy.remove(KEYS[0], evicted=True)
    left = {key for key in KEYS if key not in (KEYS[5], KEYS[0])}
    assert set(policy.victims()) == left
    assert len(list(policy.victims())) == len(policy) == len(left)
    assert KEYS[3] in policy
    assert KEYS[5] not in policy


def test_asking_for_victims_changes_nothing(policy: Policy) -> None:
    for key in KEYS:
        policy.add(key, 1)
    assert list(policy.victims()) == list(policy.victims())
    next(policy.victims())
    assert len(policy) == len(KEYS)


def test_a_key_can_come_back(policy: Policy) -> None:
    for _ in range(3):
        policy.add(KEYS[0], 1)
        policy.remove(KEYS[0], evicted=True)
    assert list(policy.victims()) == []


def test_programming_errors_assert(policy: Policy) -> None:
    policy.add(KEYS[0], 1)
    with pytest.raises(AssertionError):
        policy.add(KEYS[0], 1)
    with pytest.raises(KeyError):
        policy.remove(KEYS[1], evicted=False)


@pytest.mark.parametrize("name", sorted(POLICIES))
@settings(max_examples=100, deadline=None)
@given(steps=st.lists(st.tuples(st.sampled_from(STEPS), st.sampled_from(KEYS)), max_size=60))
def test_any_sequence_keeps_the_books(name: str, steps: list[tuple[str, ChunkKey]]) -> None:
    policy = make_policy(name)
    model: set[ChunkKey] = set()
    for step, key in steps:
        if step == "add" and key not in model:
            policy.add(key, 10)
            model.add(key)
        elif step == "touch":
            assert policy.touch(key) == (key in model)
        elif step == "batch":
            policy.begin_batch()
        elif step == "remove" and key in model:
            policy.remove(key, evicted=False)
            model.discard(key)
        elif step == "evict" and model:
            victim = next(policy.victims())
            policy.remove(victim, evicted=True)
            model.discard(victim)
        policy.check()
        order = list(policy.victims())
        assert len(order) == len(model)
        assert set(order) == model


@pytest.mark.parametrize("name", sorted(POLICIES))
@settings(max_examples=40, deadline=None)
@given(
    prompts=st.lists(st.lists(st.sampled_from(KEYS), min_size=1, max_size=6), min_size=1, max_size=30),
    skipped=st.integers(0, 2),
)
def test_prompts_in_a_small_cache_keep_the_books(name: str, prompts: list[list[ChunkKey]], skipped: int) -> None:
    """Chains with repeated keys, links that would make circles, and victims that leases protect."""
    policy = make_policy(name)
    for prompt in prompts:
        policy.begin_batch()
        for key in reversed(prompt):
            if key in policy:
                policy.touch(key)
                continue
            if len(policy) >= 5:
                policy.remove(list(policy.victims())[skipped], evicted=True)
            policy.add(key, 1)
        policy.check()
    assert len(set(policy.victims())) == len(policy) <= 5


def test_ghosts_are_bounded(policy: Policy) -> None:
    for i in range(20_000):
        policy.begin_batch()
        if len(policy) >= 100:
            policy.remove(next(policy.victims()), evicted=True)
        policy.add(ChunkKey(f"n{i}"), 1)
    assert policy.num_ghosts <= 16_384
    while len(policy):
        policy.remove(next(policy.victims()), evicted=True)
