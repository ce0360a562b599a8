"""The contract of every eviction policy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tanghulu.errors import InvalidRequest
from tanghulu.store.node.eviction import POLICIES, Policy, make_policy
from tanghulu.types import ChunkKey

STEPS = ["add", "touch", "remove", "evict"]
KEYS = [ChunkKey(f"k{i}") for i in range(12)]


@pytest.fixture(params=sorted(POLICIES))
def policy(request: pytest.FixtureRequest) -> Iterator[Policy]:
    policy = make_policy(str(request.param))
    yield policy
    policy.check()


def test_victims_are_exactly_the_keys_that_are_in(policy: Policy) -> None:
    for key in KEYS:
        policy.add(key, 100)
    policy.touch(KEYS[3])
    policy.touch(ChunkKey("unknown"))
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
            policy.touch(key)
        elif step == "remove" and key in model:
            policy.remove(key, evicted=False)
            model.discard(key)
        elif step == "evict" and model:
            victim = next(policy.victims())
            policy.remove(victim, evicted=True)
            model.discard(victim)
        policy.check()
        assert set(policy.victims()) == model


def test_lru_evicts_the_least_recently_used() -> None:
    lru = make_policy("lru")
    for key in KEYS[:4]:
        lru.add(key, 1)
    lru.touch(KEYS[0])
    assert list(lru.victims()) == [KEYS[1], KEYS[2], KEYS[3], KEYS[0]]


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(InvalidRequest, match="known: "):
        make_policy("belady")
