"""Sampling on a device draws what sampling row by row draws, in one copy."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tanghulu.session.sampling import Sampling
from tanghulu.workers.compute import device_sampling
from tanghulu.workers.compute.device_sampling import sample_on_device
from tanghulu.workers.compute.sampling import SamplingRow, sample

VOCAB = 60


class AnyGrammar:
    """Allows every third token."""

    def allowed(self, generated: Any) -> Any:
        mask = np.zeros(VOCAB, dtype=np.bool_)
        mask[len(generated) % 3 :: 3] = True
        return mask


def row(random_: random.Random, **params: Any) -> SamplingRow:
    tokens = np.array(random_.choices(range(VOCAB), k=random_.randint(1, 12)), dtype=np.uint32)
    banned = frozenset(random_.sample(range(VOCAB), random_.choice([0, 0, 2])))
    grammar: Any = AnyGrammar() if random_.random() < 0.2 else None
    return SamplingRow(Sampling(**params), tokens, random_.randint(1, len(tokens)), banned, grammar)


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.01, 0.7, 1.0, 3.0]),
        "top_k": st.sampled_from([0, 0, 1, 7, VOCAB, 500]),
        "top_p": st.sampled_from([1.0, 1.0, 0.001, 0.5, 0.95]),
        "min_p": st.sampled_from([0.0, 0.0, 0.2]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "presence_penalty": st.sampled_from([0.0, 0.5]),
        "frequency_penalty": st.sampled_from([0.0, -0.4]),
        "logit_bias": st.sampled_from([{}, {3: 4.0, 9: -2.0}]),
        "num_logprobs": st.sampled_from([None, None, 0, 3]),
        "seed": st.integers(0, 2**40),
    }
)


@settings(deadline=None, max_examples=120)
@given(params=st.lists(PARAMS, min_size=1, max_size=5), seed=st.integers(0, 999), candidates=st.sampled_from([4, 1024]))
def test_it_draws_what_each_row_alone_draws(params, seed, candidates):
    random_ = random.Random(seed)
    logits = torch.randn(len(params), VOCAB, generator=torch.Generator().manual_seed(seed)) * random_.choice([0.1, 4])
    kept = logits.clone()
    rows = [row(random_, **each) for each in params]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_sampling, "_CANDIDATES", candidates)
        got = sample_on_device(logits, rows)
    wanted = sample(logits, rows)
    assert got.tokens == wanted.tokens
    for ours, theirs in zip(got.logprobs, wanted.logprobs, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert ours.logprobs[0] == pytest.approx(theirs.logprobs[0], abs=1e-5)
            assert ours.token_ids == theirs.token_ids
    assert torch.equal(logits, kept)


def test_equal_logits_are_cut_the_same_in_every_batch():
    """Steps of 1/8, as in bfloat16: hundreds of equal logits. What others want must not change who is cut off."""
    logits = (torch.randn(1, 3000, generator=torch.Generator().manual_seed(1)) * 8).round() / 8
    alone = [Sampling(top_k=50, seed=seed, temperature=2.0) for seed in range(40)]
    other = Sampling(top_k=2500, seed=1)
    rows = [SamplingRow(each, np.array([0], dtype=np.uint32), 1, frozenset()) for each in (*alone, other)]
    together = sample_on_device(logits.expand(41, -1), rows).tokens
    for index in range(40):
        assert sample_on_device(logits, rows[index : index + 1]).tokens == together[index : index + 1]
    best = sorted(range(3000), key=lambda token: (-float(logits[0, token]), token))[:50]
    assert set(together[:40]) <= set(best)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "params", [{}, {"min_p": 0.1}, {"top_k": 5}, {"top_p": 0.9}, {"top_k": 5, "top_p": 0.9, "min_p": 0.1}]
)
def test_a_row_that_is_not_finite_costs_no_other_row(broken, params):
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1))
    logits[0] = broken
    rows = [SamplingRow(Sampling(seed=1, **params), np.array([0], dtype=np.uint32), 1, frozenset())] * 2
    drawn = sample_on_device(logits, rows).tokens
    assert 0 <= drawn[0] < VOCAB
    assert drawn[1:] == sample(logits[1:], rows[1:]).tokens


def test_ids_named_by_a_row_without_logprobs_shift_nothing():
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1))
    rows = [
        SamplingRow(Sampling(temperature=0, **params), np.array([0], dtype=np.uint32), 1, frozenset())
        for params in ({"num_logprobs": 2}, {"logprob_token_ids": (1, 2, 3, 4)})
    ]
    got, wanted = sample_on_device(logits, rows).logprobs, sample(logits, rows).logprobs
    assert got[0].token_ids == wanted[0].token_ids
    assert got[0].logprobs == pytest.approx(wanted[0].logprobs, abs=1e-5)
    assert got[1] is None


@pytest.mark.parametrize("seed", range(3))
def test_a_flat_vocabulary_is_drawn_again_over_all_of_it(seed, monkeypatch):
    logits = torch.randn(2, 5000, generator=torch.Generator().manual_seed(seed)) * 0.01
    rows = [
        SamplingRow(Sampling(top_p=0.999, seed=seed), np.array([0], dtype=np.uint32), 1, frozenset()),
        SamplingRow(Sampling(temperature=0), np.array([0], dtype=np.uint32), 1, frozenset()),
    ]
    redrawn = []
    draw_one = device_sampling.draw_one
    monkeypatch.setattr(device_sampling, "draw_one", lambda *given: redrawn.append(1) or draw_one(*given))
    assert sample_on_device(logits, rows).tokens == sample(logits, rows).tokens
    assert redrawn == [1]
