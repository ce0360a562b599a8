"""`tanghulu up --batch-invariant`: a text and its log probabilities are the same bits alone and in company."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import LiveCluster, running_cluster

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.needs_model]
QUESTIONS = [f"Tell me about the number {n}. " + "Be brief, and say why. " * n for n in range(1, 9)]


def ask(live: LiveCluster, question: str) -> dict[str, Any]:
    """The answer's text and log probabilities, handed over from the prefill worker to the decode worker."""
    body = {"model": "smollm2", "messages": [{"role": "user", "content": question}], "temperature": 0}
    reply = live.http.post(
        f"{live.url}/v1/chat/completions", json=body | {"max_tokens": 24, "logprobs": True, "top_logprobs": 3}
    )
    choice: dict[str, Any] = reply.raise_for_status().json()["choices"][0]
    return choice


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_company_changes_nothing(tmp_path: Path, kv_dtype: str) -> None:
    with running_cluster(tmp_path / "c", "--dtype", "bfloat16", "--kv-dtype", kv_dtype, "--batch-invariant") as live:
        alone = [ask(live, question) for question in QUESTIONS]
        live.http.post(f"{live.url}/flush_cache").raise_for_status()
        with ThreadPoolExecutor(len(QUESTIONS)) as pool:
            together = list(pool.map(lambda question: ask(live, question), QUESTIONS))
        again = [ask(live, question) for question in QUESTIONS]  # prefixes are cached now
    assert together == alone == again
