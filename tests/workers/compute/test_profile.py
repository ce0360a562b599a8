"""``--profile``: the first steps are traced, the text is the same, and later steps are not traced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tanghulu.errors import ConfigError
from tanghulu.workers.compute.lanes import LEAST_ROWS
from tanghulu.workers.compute.models.model import Model
from tanghulu.workers.compute.runners import ProfiledRunner, TorchRunner
from tanghulu.workers.config import WorkerConfig
from tanghulu.workers.engine.engine import EngineCore
from tanghulu.workers.engine.scheduler import EngineCoreConfig
from tests.workers.tiny import BLOCK, engine, request, run_all, runner_of


def _traced(model: Model, path: Path, num_steps: int) -> dict[str, list[int]]:
    runner = runner_of(TorchRunner, model, block_tokens=BLOCK, kv_capacity_bytes=1 << 20)
    core = EngineCore(ProfiledRunner(runner, path, num_steps), EngineCoreConfig(block_tokens=BLOCK))
    core.add(request("a", range(2, 20), 6))
    return run_all(core)


def test_the_trace_has_the_steps_it_was_asked_for(tiny_model: Model, tmp_path: Path) -> None:
    plain = engine(tiny_model)
    plain.add(request("a", range(2, 20), 6))
    assert _traced(tiny_model, tmp_path / "trace.json", 3) == run_all(plain)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    embeddings = [event for event in events if event.get("name") == "aten::embedding"]
    assert len(embeddings) == 3


def test_lanes_are_traced_too(tiny_model: Model, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        runner = ProfiledRunner(
            runner_of(TorchRunner, tiny_model, block_tokens=BLOCK, kv_capacity_bytes=4 << 20), tmp_path / "t", 1
        )
        core = EngineCore(runner, EngineCoreConfig(block_tokens=BLOCK))
        core.add(request("a", [2 + index % 80 for index in range(2 * LEAST_ROWS)], 2))
        run_all(core)
    finally:
        torch.set_num_threads(before)
    events = json.loads((tmp_path / "t").read_text())["traceEvents"]
    assert len({event["tid"] for event in events if event.get("name") == "aten::embedding"}) == 2


def test_a_trace_that_cannot_be_written_stops_no_request(tiny_model: Model, tmp_path: Path) -> None:
    assert len(_traced(tiny_model, tmp_path / "absent" / "trace.json", 2)["a"]) == 6


def test_only_the_torch_engine_is_traced() -> None:
    with pytest.raises(ConfigError, match="--debug profile"):
        WorkerConfig(engine="mock", profile="x")
