"""Sampling: each filter against a plain computation, and the draw as a function of seed and position alone."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from tanghulu.errors import InvalidRequest
from tanghulu.session.sampling import Sampling
from tanghulu.workers.compute.sampling import SamplingRow, sample, unit_uniform

LOGITS = torch.tensor([[1.0, 3.0, 2.0, -1.0, 0.5, 2.5]])


def row(
    tokens: list[int] | None = None, num_prompt: int = 1, banned: frozenset[int] = frozenset(), **params: Any
) -> SamplingRow:
    return SamplingRow(Sampling(**params), np.array(tokens or [0], dtype=np.uint32), num_prompt, banned)


def draws(count: int = 2000, **params: Any) -> Counter[int]:
    rows = [row(seed=seed, **params) for seed in range(count)]
    return Counter(sample(LOGITS.expand(count, -1), rows).tokens)


def test_temperature_zero_is_the_argmax() -> None:
    assert sample(LOGITS, [row(temperature=0)]).tokens == [1]
    assert sample(LOGITS, [row(temperature=0, logit_bias={4: 5.0})]).tokens == [4]
    assert sample(LOGITS, [row(temperature=0, banned=frozenset({1}))]).tokens == [5]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    expected = torch.softmax(LOGITS[0] / temperature, dim=-1)
    counts = draws(temperature=temperature)
    for token in range(6):
        assert counts[token] / 2000 == pytest.approx(float(expected[token]), abs=0.035)


def test_tiny_temperature_does_not_overflow() -> None:
    assert draws(50, temperature=1e-8) == {1: 50}


def test_top_k_top_p_min_p_cut_the_tail() -> None:
    assert set(draws(top_k=2)) == {1, 5}
    # Shares in order: 1: 0.45, 5: 0.27, 2: 0.17, 0: 0.06, ...
    assert set(draws(top_p=0.3)) == {1}
    assert set(draws(top_p=0.6)) == {1, 5}
    assert set(draws(top_p=0.8)) == {1, 5, 2}
    assert set(draws(top_k=2, top_p=0.6)) == {1}, "top-p counts shares of what top-k left"
    assert set(draws(min_p=0.5)) == {1, 5}
    assert set(draws(top_p=0.8, min_p=0.5)) == {1, 5}


def test_top_p_over_a_flat_vocabulary_needs_the_whole_sort() -> None:
    logits = torch.zeros(200, 4000)
    tokens = sample(logits, [row(seed=seed, top_p=0.9) for seed in range(200)]).tokens
    assert len(set(tokens)) > 150
    assert max(tokens) >= 512


def test_penalties() -> None:
    # Token 1 stands in the prompt, 5 was generated twice.
    tokens = [1, 5, 5]
    assert sample(LOGITS, [row(tokens, temperature=0, repetition_penalty=2.0)]).tokens == [2]
    assert sample(LOGITS, [row(tokens, temperature=0, presence_penalty=9.0)]).tokens == [1]
    assert sample(LOGITS, [row(tokens, 0, temperature=0, presence_penalty=0.6)]).tokens == [1]
    assert sample(LOGITS, [row(tokens, 0, temperature=0, presence_penalty=1.1)]).tokens == [2]
    assert sample(LOGITS, [row([5, 5, 5, 1], 0, temperature=0, frequency_penalty=0.4)]).tokens == [1]
    negative = torch.tensor([[-1.0, -1.5]])
    assert sample(negative, [row([0], temperature=0, repetition_penalty=2.0)]).tokens == [1]


def test_the_logits_are_not_changed() -> None:
    before = LOGITS.clone()
    sample(LOGITS, [row([1, 5], temperature=0.7, repetition_penalty=2.0, banned=frozenset({2}))])
    assert torch.equal(LOGITS, before)


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    torch.manual_seed(0)
    logits = torch.randn(40, 500)
    kinds: list[dict[str, Any]] = [{}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.1}, {"temperature": 0}]
    rows = [row([1] * (1 + i), seed=i // 3, **kinds[i % 5]) for i in range(40)]
    together = sample(logits, rows).tokens
    alone = [sample(logits[i : i + 1], [rows[i]]).tokens[0] for i in range(40)]
    assert together == alone
    order = list(range(39, -1, -1))
    assert sample(logits[order], [rows[i] for i in order]).tokens == together[::-1]


def test_uniforms_are_uniform_and_distinct() -> None:
    values = [unit_uniform(seed, position) for seed in range(-20, 30) for position in range(40)]
    assert len(set(values)) == len(values)
    assert all(0 <= value < 1 for value in values)
    assert np.histogram(values, 10, (0, 1))[0].min() > 150


def test_logprobs_are_the_models_own() -> None:
    sampled = sample(
        LOGITS.repeat(2, 1), [row(temperature=0, num_logprobs=2, banned=frozenset({1})), row(temperature=0)]
    )
    expected = torch.log_softmax(LOGITS[0], dim=-1)
    logprobs = sampled.logprobs[0]
    assert logprobs is not None
    assert logprobs.token_ids == (5, 1, 5)
    assert logprobs.logprobs[0] == pytest.approx(float(expected[5]), abs=1e-6)
    assert math.exp(logprobs.logprobs[1]) == pytest.approx(float(expected[1].exp()), abs=1e-6)
    assert sampled.logprobs[1] is None


@pytest.mark.parametrize("bad", [{"temperature": -1}, {"top_p": 0}, {"top_k": -1}, {"min_p": 2}, {"num_logprobs": 99}])
def test_bad_parameters_are_named(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(bad))):
        Sampling(**bad).validate()
