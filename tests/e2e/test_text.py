"""The text that comes out is the model's: token by token that of transformers, whatever the way it was computed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LENGTHS = (5, 17, 63, 64, 65, 200, 1000, 3000)
NUM_TOKENS = 16


@pytest.fixture(scope="module")
def prompts(reference) -> list[list[int]]:
    """Prompts of LENGTHS tokens, each from another place of real English prose."""
    text = (ROOT / "LICENSE").read_text() + (ROOT / "docs/architecture.md").read_text()
    ids = reference.tokenizer.encode(text)
    assert len(ids) > LENGTHS[-1] + len(LENGTHS), len(ids)
    return [ids[i : i + n] for i, n in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def expected(reference, prompts) -> list[list[int]]:
    return [reference.greedy(p, NUM_TOKENS) for p in prompts]


def test_alone(cluster, prompts, expected):
    for prompt, wanted in zip(prompts, expected, strict=True):
        assert cluster.generate(prompt, NUM_TOKENS)["output_ids"] == wanted, len(prompt)


def test_batched_and_with_prefixes_from_the_store(cluster, prompts, expected):
    cluster.drop_worker_caches()
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda p: cluster.generate(p, NUM_TOKENS), prompts))
    assert [a["output_ids"] for a in answers] == expected
    cached = [a["meta_info"]["cached_tokens"] for a in answers]
    assert cached == [(n - 1) // 64 * 64 for n in LENGTHS]
