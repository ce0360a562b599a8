"""A cluster whose workers compute on a GPU: the text is transformers', through hand-over and store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.cluster import running_cluster
from tests.workers.tiny import write_served

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="hardware: no GPU, torch.cuda.is_available() is False"),
]


def greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        for _ in range(num_tokens):
            ids = torch.cat((ids, model(ids).logits[:, -1:].argmax(-1)), dim=1)
    return ids[0, len(prompt) :].tolist()


def test_the_text_of_a_cluster_on_a_gpu(tmp_path: Path):
    """A model made here: no package with a model need be on a machine that has a GPU."""
    served = write_served(tmp_path / "model")
    reference, prompts = served.reference(), [[2 + at * at % 255 for at in range(length)] for length in (9, 180, 900)]
    wanted = [greedy(reference, prompt, 12) for prompt in prompts]
    with running_cluster(tmp_path / "state", "--device", "cuda", "--model", str(served.path)) as live:
        generated = [live.generate(prompt, 12, ignore_eos=True) for prompt in prompts]
        assert [answer["output_ids"] for answer in generated] == wanted
        live.drop_worker_caches()
        again = [live.generate(prompt, 12, ignore_eos=True) for prompt in prompts]
    assert [answer["output_ids"] for answer in again] == wanted
    assert again[2]["meta_info"]["cached_tokens"] == (len(prompts[2]) - 1) // 64 * 64
