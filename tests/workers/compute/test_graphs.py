"""Which steps are replayed and what happens when recording fails; the recording itself needs a GPU."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import structlog
import torch

from tanghulu.transfer_engine.gpu.staging import CudaCopier
from tanghulu.workers.compute import cuda_graphs
from tanghulu.workers.compute.cuda_graphs import DecodeGraphs
from tanghulu.workers.compute.device import CPU
from tanghulu.workers.compute.forward_batch import DecodeShape, SequenceChunk, decode_batch, pack_decodes
from tanghulu.workers.compute.models.model import Model
from tanghulu.workers.compute.runners import DeviceRunner
from tanghulu.workers.engine.engine import EngineCore
from tanghulu.workers.engine.scheduler import EngineCoreConfig
from tests.workers.tiny import BLOCK, engine, request, run_all, runner_of

PROMPTS = [[2 + (i * seed) % 90 for i in range(length)] for seed, length in ((3, 5), (7, 30), (5, 61))]


class Played(DecodeGraphs):
    """Graphs that are functions: they read the static input when they are replayed, not when they are recorded."""

    fails_at = 99

    def _recorded(self, shape: Any) -> Any:
        if len(self._graphs) >= self.fails_at:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore words")
        packed = torch.from_numpy(pack_decodes([], shape, BLOCK, self._cache.scratch))
        results = torch.empty(shape.num_sequences, self._model.config.vocab)

        def replay() -> None:
            self.num_replays = getattr(self, "num_replays", 0) + 1
            results.copy_(self._model.forward(decode_batch(packed, BLOCK), self._cache))

        return SimpleNamespace(graph=SimpleNamespace(replay=replay), packed=packed, logits=results)


def texts(core: EngineCore) -> dict[str, list[int]]:
    for index, prompt in enumerate(PROMPTS):
        core.add(request(str(index), prompt, 10 + 4 * index))
    return run_all(core)


def played(model: Model, monkeypatch: pytest.MonkeyPatch) -> tuple[EngineCore, Played]:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    runner = runner_of(DeviceRunner, model, block_tokens=BLOCK, num_blocks=64)
    graphs = runner._graphs = Played(model, runner.cache)
    return EngineCore(runner, EngineCoreConfig(block_tokens=BLOCK, debug_checks=True)), graphs


def test_steps_are_replayed_and_the_text_is_the_same(tiny_model: Model, monkeypatch: pytest.MonkeyPatch):
    core, graphs = played(tiny_model, monkeypatch)
    assert texts(core) == texts(engine(tiny_model))
    assert graphs.num_replays > 10
    assert {shape.num_sequences for shape in graphs._graphs} == {1, 2, 4}


@pytest.mark.parametrize("most", [0, 1])
def test_beyond_the_bound_steps_run_without(tiny_model: Model, monkeypatch: pytest.MonkeyPatch, most: int):
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", most)
    core, graphs = played(tiny_model, monkeypatch)
    assert texts(core) == texts(engine(tiny_model))
    assert len(graphs._graphs) == most


def test_a_worker_records_the_shapes_of_its_steps_before_the_first(tiny_model: Model, monkeypatch: pytest.MonkeyPatch):
    core, graphs = played(tiny_model, monkeypatch)
    graphs.record(core.config.max_num_seqs)
    recorded = set(graphs._graphs)
    assert {shape.num_sequences for shape in recorded} == {1, 2, 4, 8, 16, 24, 32}
    assert {shape.num_blocks for shape in recorded} == {4, 8, 16, 32}, "256 tokens of context"
    assert texts(core) == texts(engine(tiny_model))
    assert set(graphs._graphs) == recorded


def test_what_no_graph_is_left_for_is_said_once(tiny_model: Model, monkeypatch: pytest.MonkeyPatch):
    """The narrow shapes, which most steps have, come first."""
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 8)
    core, graphs = played(tiny_model, monkeypatch)
    with structlog.testing.capture_logs() as logs:
        graphs.record(32)
        texts(core)
    assert [(entry["num_graphs"], entry["not_recorded"]) for entry in logs if entry["event"] == "cuda_graphs.full"] == [
        (8, (24, 8))
    ]
    assert list(graphs._graphs) == [*((size, 4) for size in (32, 24, 16, 8, 4, 2, 1)), (32, 8)]


def test_sizes_of_steps():
    sizes = [
        DecodeShape.of([SequenceChunk([1], 5, [1], True)] * count, 8).num_sequences for count in (1, 3, 16, 17, 65)
    ]
    assert sizes == [1, 4, 16, 24, 72]


def test_a_recording_that_fails_is_said_once_and_costs_no_step(tiny_model: Model, monkeypatch: pytest.MonkeyPatch):
    core, graphs = played(tiny_model, monkeypatch)
    graphs.fails_at = 1
    with structlog.testing.capture_logs() as said:
        assert texts(core) == texts(engine(tiny_model))
    failures = [entry for entry in said if entry["event"] == "cuda_graphs.failed"]
    assert [entry["error"] for entry in failures] == ["CUDA error: operation not permitted when stream is capturing"]
    assert graphs.num_replays > 0, "what was recorded before is still used"


class Stream:
    """Notes what is asked of it."""

    made: ClassVar[list[Stream]] = []

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self.asked: list[str] = []
        self.priority = priority
        Stream.made.append(self)

    def wait_stream(self, other: str) -> None:
        self.asked.append(f"after {other}")

    def synchronize(self) -> None:
        self.asked.append("wait")


@pytest.mark.parametrize("settled", [True, False])
def test_copies_of_a_half_have_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch, settled: bool):
    """And wait for the caller's stream only where somebody may still compute what is copied."""
    monkeypatch.setattr(Stream, "made", [])
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the caller's")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext(stream.asked.append("copy")))
    copier = CudaCopier([CPU], settled=settled)
    source, target = torch.arange(5), torch.zeros(5, dtype=torch.int64)
    for half in (0, 1, 1):
        copier.copy(half, target, source)
    assert torch.equal(target, source)
    copier.wait(1)
    assert {stream.priority for stream in Stream.made} == {-1}, "a pool of streams that no graph is recorded on"
    each = ["copy"] if settled else ["after the caller's", "copy"]
    assert [stream.asked for stream in Stream.made] == [each, [*each, *each, "wait"]]


def test_streams_are_made_before_the_first_copy(tiny_model: Model, monkeypatch: pytest.MonkeyPatch):
    """So threads that copy first at once share the half's stream, and no recording decides which it is."""
    monkeypatch.setattr(Stream, "made", [])
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext(stream.asked.append("copy")))
    copier, rest = CudaCopier([CPU, CPU], settled=True), torch.zeros(2)
    assert len(Stream.made) == 2
    core, _ = played(tiny_model, monkeypatch)
    texts(core)
    assert len(Stream.made) == 3, "all warm-ups have one"
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: copier.copy(0, torch.zeros(2), rest), range(8)))
    copier.wait(0)
    assert [stream.asked for stream in Stream.made] == [["copy"] * 8 + ["wait"], [], []]
