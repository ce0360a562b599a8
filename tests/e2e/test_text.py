"""The text that comes out is the model's: token by token that of transformers, whatever the way it was computed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.cluster import LiveCluster
from tests.e2e.reference import LENGTHS, NUM_TOKENS, Continuations, Reference


@pytest.fixture(scope="module")
def texts() -> Continuations:
    return Continuations.kept()


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


def test_alone(cluster: LiveCluster, texts: Continuations) -> None:
    for prompt, wanted in zip(texts.prompts, texts.expected, strict=True):
        assert cluster.generate(prompt, NUM_TOKENS)["output_ids"] == wanted, len(prompt)


def test_batched_and_with_prefixes_from_the_store(cluster: LiveCluster, texts: Continuations) -> None:
    cluster.settle()
    cluster.drop_worker_caches()
    with ThreadPoolExecutor(len(LENGTHS)) as pool:
        answers = list(pool.map(lambda p: cluster.generate(p, NUM_TOKENS), texts.prompts))
    assert [a["output_ids"] for a in answers] == texts.expected
    cached = [a["meta_info"]["cached_tokens"] for a in answers]
    assert cached == [(n - 1) // 64 * 64 for n in LENGTHS]


@pytest.mark.slow
def test_log_probabilities_of_prompts(cluster: LiveCluster, texts: Continuations, reference: Reference) -> None:
    """As evaluations ask for them, of texts that are cached and in the store, too."""
    for prompt in texts.prompts[1:6]:
        expected = reference.prompt_logprobs(prompt)
        for _ in range(2):
            body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 0}
            answer = cluster.http.post(f"{cluster.url}/v1/completions", json=body).json()
            got = answer["choices"][0]["logprobs"]["token_logprobs"]
            assert got[0] is None
            assert got[1:] == pytest.approx(expected, abs=1e-3)
            cluster.settle()


@pytest.mark.slow
def test_what_is_kept_is_what_transformers_say(texts: Continuations, reference: Reference) -> None:
    assert [len(prompt) for prompt in texts.prompts] == list(LENGTHS)
    assert [reference.greedy(prompt, NUM_TOKENS) for prompt in texts.prompts] == texts.expected
