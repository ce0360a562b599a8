"""A cluster whose workers compute on a GPU: the text is transformers', through hand-over and store."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.e2e.cluster import running_cluster

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="hardware: no GPU, torch.cuda.is_available() is False"),
]


def test_the_text_of_a_cluster_on_a_gpu(reference, tmp_path: Path):
    prompts = [reference.tokenizer.encode("The sea " * count)[:900] for count in (3, 60, 400)]
    wanted = [reference.greedy(prompt, 12) for prompt in prompts]
    with running_cluster(tmp_path / "state", "--device", "cuda") as live:
        assert [live.generate(prompt, 12)["output_ids"] for prompt in prompts] == wanted
        live.drop_worker_caches()
        again = [live.generate(prompt, 12) for prompt in prompts]
    assert [answer["output_ids"] for answer in again] == wanted
    assert again[2]["meta_info"]["cached_tokens"] == (len(prompts[2]) - 1) // 64 * 64
