"""The memory plan: close to what a model takes, and a refusal that says what to change."""

from __future__ import annotations

from pathlib import Path

import pytest

from tanghulu.errors import ConfigError
from tanghulu.workers.compute.memory_plan import MemoryPlan, available_bytes
from tanghulu.workers.weights import resolve_model
from tests.workers.tiny import TinyModel


def _plan(tiny: TinyModel, **changes: int) -> MemoryPlan:
    sizes = {"kv_bytes": 1 << 20, "num_batched_tokens": 64, "num_seqs": 4, "stored_item_bytes": 4} | changes
    sizes.setdefault("computed_item_bytes", 4)
    return MemoryPlan.of(resolve_model(str(tiny.path)).config, **sizes)


def test_weights_are_those_of_the_file(tiny: TinyModel) -> None:
    stored = (tiny.path / "model.safetensors").stat().st_size
    assert stored * 0.9 < _plan(tiny).weights_bytes < stored * 1.1


def test_ranks_share_the_layers_and_each_has_the_embedding(tiny: TinyModel) -> None:
    embedding = tiny.config["vocab_size"] * tiny.config["hidden_size"] * 4
    rotary = 2 * tiny.config["max_position_embeddings"] * tiny.config["head_dim"] * 4
    assert _plan(tiny, num_ranks=2).weights_bytes - _plan(tiny).weights_bytes == embedding + rotary


def test_more_tokens_in_a_step_take_more_workspace(tiny: TinyModel) -> None:
    assert _plan(tiny, num_batched_tokens=128).workspace_bytes > _plan(tiny).workspace_bytes


def test_what_cannot_fit_is_refused_with_the_plan(tiny: TinyModel) -> None:
    plan = _plan(tiny, kv_bytes=1 << 40)
    with pytest.raises(ConfigError, match=r"KV cache 1\.?0? ?TiB.*lower --kv-memory"):
        plan.require(16 << 30)
    plan.require(None)
    _plan(tiny).require(16 << 30)


def test_available_memory_is_what_the_kernel_says(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:  5 kB\n")
    assert available_bytes(tmp_path / "meminfo") == 5 * 1024
    assert available_bytes(tmp_path / "absent") is None
