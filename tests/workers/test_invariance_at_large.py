"""Batch invariance on the real model, at large: 200 prompts in every way of serving, greedy and drawn, bit by bit.

Ten groups of 20 prompts, each a test, so that what has been shown stands there before all of it has ended.

    python -m pytest tests/workers/test_invariance_at_large.py -v        # minutes of both cores for each type
"""

from __future__ import annotations

import random

import pytest
import torch
from tokenizers import Tokenizer

from tanghulu.session.sampling import Sampling
from tanghulu.workers.compute.linear import Arithmetic
from tanghulu.workers.compute.models.model import Model, dtype_name, load_model
from tanghulu.workers.weights import ModelSource
from tanghulu.workers.weights.tokenizer_assets import load_tokenizer_assets
from tests.workers.test_smollm2 import TEXTS
from tests.workers.ways import WAYS, Served

pytestmark = [pytest.mark.needs_model, pytest.mark.slow, pytest.mark.by_hand, pytest.mark.timeout(3600)]

SEED = 18
NUM_GROUPS, GROUP = 10, 20
#: Of each group: how many prompts, and from how many tokens to how many; every second group has one of ``LONG`` more,
#: the others one that is short. A prompt alone spans steps of 64, a long one steps of 256.
LENGTHS = ((14, (1, 12)), (4, (13, 64)), (1, (65, 100)))
SHORT, LONG = (1, 12), (257, 300)
BLOCK_TOKENS, NUM_NEW = 4, 6


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32], ids=dtype_name)
def model(request: pytest.FixtureRequest, smollm2: ModelSource) -> Model:
    return load_model(smollm2, request.param, arithmetic=Arithmetic.of(request.param, invariant=True))


@pytest.fixture(scope="module")
def prompts(smollm2: ModelSource) -> list[list[tuple[list[int], Sampling]]]:
    """The groups' prompts: cuts of texts, a third behind one of three common beginnings; every second one is drawn."""
    tokenizer = Tokenizer.from_buffer(load_tokenizer_assets(smollm2).tokenizer_json)
    random_ = random.Random(SEED)
    ids = tokenizer.encode(" ".join(random_.choices(TEXTS, k=200))).ids
    beginnings = [_cut(random_, ids, length) for length in (8, 17, 24)]
    groups = []
    for number in range(NUM_GROUPS):
        group = []
        for count, (least, most) in (*LENGTHS, (1, SHORT if number % 2 else LONG)):
            for _ in range(count):
                own = _cut(random_, ids, random_.randint(least, most))
                group.append(random_.choice(beginnings) + own if random_.random() < 1 / 3 else own)
        random_.shuffle(group)
        groups.append([(tokens, _sampling(number * GROUP + at)) for at, tokens in enumerate(group)])
    assert {len(group) for group in groups} == {GROUP}
    return groups


def _cut(random_: random.Random, ids: list[int], length: int) -> list[int]:
    start = random_.randrange(len(ids) - length)
    return ids[start : start + length]


def _sampling(number: int) -> Sampling:
    if number % 2 == 0:
        return Sampling(temperature=0, num_logprobs=3)
    return Sampling(temperature=0.9, top_k=(0, 40)[number % 4 == 1], top_p=0.95, seed=number, num_logprobs=3)


@pytest.mark.parametrize("group", range(NUM_GROUPS))
def test_the_same_bits_in_every_way(model: Model, prompts: list[list[tuple[list[int], Sampling]]], group: int) -> None:
    served = Served(model, prompts[group], num_new=NUM_NEW, block_tokens=BLOCK_TOKENS)
    alone = served.alone()
    for name, way in WAYS.items():
        for index, (got, wanted) in enumerate(zip(way(served), alone, strict=True)):
            assert got == wanted, f"{name}: prompt {index} of {len(prompts[group][index][0])} tokens"
