"""The runner for devices, on main memory: the same text as the runner for CPUs, whatever is scheduled."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import structlog
import torch

from tanghulu.errors import ConfigError
from tanghulu.session.sampling import PromptScoring, Sampling
from tanghulu.workers.compute import device as device_module
from tanghulu.workers.compute.attention.base import AttentionBackend, SdpaAttention
from tanghulu.workers.compute.attention.varlen import Kernel, VarlenAttention
from tanghulu.workers.compute.device import (
    CPU,
    describe_device,
    device_of_rank,
    free_bytes,
    num_sharing,
    pick_device,
    reserve,
)
from tanghulu.workers.compute.forward_batch import ForwardBatch, SequenceChunk
from tanghulu.workers.compute.kv_cache import DeviceKvCache
from tanghulu.workers.compute.memory_plan import MemoryPlan
from tanghulu.workers.compute.models.model import Model, load_model, pick_dtype
from tanghulu.workers.compute.runners import DeviceRunner, in_passes
from tanghulu.workers.config import WorkerConfig
from tanghulu.workers.engine.engine import EngineCore
from tanghulu.workers.engine.scheduler import EngineCoreConfig
from tanghulu.workers.weights import resolve_model
from tests.workers.compute.varlen_kernel import varlen_attn
from tests.workers.tiny import BLOCK, VOCAB, TinyModel, engine, request, run_all, runner_of

BACKENDS = {
    "sdpa": SdpaAttention(),
    "tables": VarlenAttention(Kernel(varlen_attn, reads_tables=True)),
    "gathered": VarlenAttention(Kernel(varlen_attn, reads_tables=False)),
}


def device_engine(tiny: TinyModel, attention: AttentionBackend, num_blocks: int) -> EngineCore:
    model = load_model(resolve_model(str(tiny.path)), torch.float32, attention=attention)
    runner = runner_of(DeviceRunner, model, block_tokens=BLOCK, num_blocks=num_blocks)
    config = EngineCoreConfig(block_tokens=BLOCK, max_num_batched_tokens=64, max_num_seqs=8, debug_checks=True)
    return EngineCore(runner, config)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_blocks", [64, 18])
def test_the_text_is_the_same(tiny: TinyModel, tiny_model: Model, backend: str, num_blocks: int) -> None:
    """Chunked prompts, decodes beside them, shared prefixes, with few blocks preemptions; greedy and drawn."""
    texts = []
    for core in (device_engine(tiny, BACKENDS[backend], num_blocks), engine(tiny_model, num_blocks)):
        random_ = random.Random(4)
        shared = random_.choices(range(2, VOCAB), k=20)
        for index, length in enumerate((1, 7, 30, 75, 12, 40)):
            prompt = [*shared, *random_.choices(range(2, VOCAB), k=length)][-max(length, 2) :]
            sampling = Sampling(temperature=index % 2, top_k=20, seed=index)
            core.add(request(str(index), shared[: index * 4] + prompt, 12, sampling=sampling))
        texts.append(run_all(core))
        core.check()
    assert texts[0] == texts[1]


def test_prompts_alone_leave_nothing_to_sample(tiny: TinyModel) -> None:
    core = device_engine(tiny, SdpaAttention(), 64)
    core.add(request("one", [2 + i % 90 for i in range(150)], 1))
    first = core.step()
    assert not first.outputs
    assert first.num_computed_tokens == 64


class TestPicking:
    def test_auto_is_the_cpu_where_there_is_no_gpu(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert pick_device("auto") == CPU == pick_device("cpu")
        with pytest.raises(ConfigError, match=r"--device cuda: torch .* sees no GPU here"):
            pick_device("cuda")

    def test_gpus_are_counted(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        assert pick_device("auto") == torch.device("cuda", 0) == pick_device("cuda")
        assert pick_device("cuda:1") == torch.device("cuda", 1)
        with pytest.raises(ConfigError, match="this host has 2 GPUs, cuda:0 to cuda:1"):
            pick_device("cuda:2")
        assert device_of_rank(torch.device("cuda", 0), 1) == torch.device("cuda", 1)
        with pytest.raises(ConfigError, match=r"rank 2 needs cuda:2.*--tp"):
            device_of_rank(torch.device("cuda", 0), 2)
        with pytest.raises(ConfigError, match="choose auto"):
            pick_device("tpu")

    def test_types_of_gpus(self, monkeypatch):
        gpu = torch.device("cuda", 0)
        for capability, dtype in (((9, 0), torch.bfloat16), ((7, 5), torch.float16)):
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
            assert pick_dtype("auto", gpu) is dtype
            assert pick_dtype("float32", gpu) is torch.float32
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
        assert describe_device(gpu) == "cuda:0 (H200, capability 7.5)"
        assert describe_device(CPU) == "cpu"

    def test_memory_is_the_devices(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5, 9))
        assert free_bytes(torch.device("cuda", 0)) == 5
        monkeypatch.setattr(device_module, "available_bytes", lambda: 7)
        assert free_bytes(CPU) == 7

    @pytest.mark.parametrize("name", ["gpu", "cuda:x", "cuda:"])
    def test_names_that_are_none(self, name: str):
        with pytest.raises(ConfigError, match="--device is"):
            WorkerConfig(device=name)


def test_the_plan_of_a_gpu(tmp_path: Path, tiny: TinyModel) -> None:
    """An 8B model in bfloat16: its 16 GB, and what cannot fit is refused."""
    config = replace(
        resolve_model(str(tiny.path)).config, vocab=128_256, hidden=4096, intermediate=14_336, num_layers=32,
        num_heads=32, num_kv_heads=8, head_dim=128, max_context=131_072, tie_embeddings=False,
    )  # fmt: skip
    sizes = {"num_batched_tokens": 2048, "num_seqs": 128, "item_bytes": 2, "gathered_tokens": 262_144}
    sizes["gathered_item_bytes"] = 2
    plan = MemoryPlan.on_gpu(config, kv_bytes=40 << 30, block_bytes=8 << 20, has_masks=False, **sizes)
    assert plan.weights_bytes == pytest.approx(16.06e9 + 2 * 131_072 * 128 * 4, rel=0.001)
    assert plan.kv_bytes == (40 << 30) + (8 << 20)
    assert 1 << 30 < plan.workspace_bytes < 4 << 30
    graphs = MemoryPlan.on_gpu(
        config, kv_bytes=40 << 30, block_bytes=8 << 20, has_masks=False, has_graphs=True, **sizes
    )
    recorded = 128 * 4 * 128_256 * 4 + 2 * 262_144 * 8 * 128 * 2  # logits, gathered keys and values
    assert recorded < graphs.total_bytes - plan.total_bytes == graphs.graphs_bytes < 1.1 * recorded
    assert plan.libraries_bytes == 512 << 20
    assert "libraries 512.0 MiB" in str(plan)
    half = MemoryPlan.on_gpu(config, kv_bytes=40 << 30, block_bytes=8 << 20, has_masks=False, num_ranks=2, **sizes)
    assert half.total_bytes < 0.6 * plan.total_bytes
    masked = MemoryPlan.on_gpu(config, kv_bytes=40 << 30, block_bytes=8 << 20, has_masks=True, **sizes)
    assert masked.workspace_bytes - plan.workspace_bytes == 2048 * 131_072 * 4 * 2
    widened = MemoryPlan.on_gpu(
        config, kv_bytes=40 << 30, block_bytes=8 << 20, has_masks=False, **sizes | {"gathered_item_bytes": 7}
    )
    assert widened.workspace_bytes - plan.workspace_bytes == 5 * 2 * 262_144 * 8 * 128
    with pytest.raises(ConfigError, match="lower --kv-memory"):
        plan.require(48 << 30)
    tied = replace(config, tie_embeddings=True)
    less = MemoryPlan.on_gpu(tied, kv_bytes=40 << 30, block_bytes=8 << 20, has_masks=False, **sizes)
    assert plan.weights_bytes - less.weights_bytes == 128_256 * 4096 * 2


def _texts_and_scores(core: EngineCore) -> tuple[dict[str, list[int]], dict[int, float]]:
    """Of several requests, of which one wants its prompt scored: the texts, and the scores by position."""
    for index, length in enumerate((88, 7, 61, 3)):
        sampling = Sampling(temperature=index % 2, top_k=20, seed=index)
        scoring = PromptScoring(1, 0) if index == 0 else None
        core.add(request(str(index), range(2, 2 + length), 8, sampling=sampling, scoring=scoring))
    texts: dict[str, list[int]] = {}
    scores: dict[int, float] = {}
    while core.scheduler.has_work:
        result = core.step()
        for output in result.outputs:
            texts.setdefault(output.request_id, []).extend(output.tokens)
        for part in result.scores:
            assert part.position not in scores
            scores |= {part.position + at: round(float(value), 4) for at, value in enumerate(part.logprobs)}
    return texts, scores


class TestOutOfMemory:
    """A device whose memory holds passes of so many tokens."""

    def _with_room(self, tiny: TinyModel, monkeypatch: pytest.MonkeyPatch, most: int) -> tuple[EngineCore, list[int]]:
        core = device_engine(tiny, SdpaAttention(), 64)
        assert isinstance(core.runner, DeviceRunner)
        model, passes = core.runner.model, list[int]()
        forward = model.forward

        def bounded(batch: ForwardBatch, cache: DeviceKvCache) -> torch.Tensor:
            if batch.num_tokens > most:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            passes.append(batch.num_tokens)
            return forward(batch, cache)

        monkeypatch.setattr(model, "forward", bounded)
        return core, passes

    def test_a_step_without_room_is_computed_in_halves_and_so_are_later_ones(
        self, tiny: TinyModel, tiny_model: Model, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        core, passes = self._with_room(tiny, monkeypatch, 40)
        with structlog.testing.capture_logs() as logs:
            got = _texts_and_scores(core)
        assert got == _texts_and_scores(engine(tiny_model))
        halved = [entry["most_tokens"] for entry in logs if entry["event"] == "step.out_of_memory"]
        assert halved == [32]
        assert max(passes) == 32

    def test_the_second_time_ends_the_worker(self, tiny: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
        core, _ = self._with_room(tiny, monkeypatch, 31)
        core.add(request("one", range(2, 90), 1))
        with pytest.raises(torch.OutOfMemoryError):
            run_all(core)

    def test_passes_keep_the_order_and_rows_that_give_logits_together(self) -> None:
        chunks = [
            SequenceChunk(list(range(9)), 4, [1], True, num_more_logits=2),
            SequenceChunk([7], 3, [2], True),
            SequenceChunk(list(range(5)), 0, [3], False),
        ]
        cut = [
            [(len(chunk.token_ids), chunk.start, chunk.wants_logits, chunk.num_more_logits) for chunk in part]
            for part in in_passes(chunks, 4)
        ]
        assert cut == [
            [(4, 4, False, 0)],
            [(2, 8, False, 0)],
            [(3, 10, True, 2), (1, 3, True, 0)],
            [(4, 0, False, 0)],
            [(1, 4, False, 0)],
        ]
        assert [len(part) for part in in_passes(chunks, 100)] == [3]
        assert [len(part) for part in in_passes(chunks[:1], 1)] == [1] * 7, "the last three rows stay together"


class TestReserving:
    def test_a_gpu_that_another_took_meanwhile_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Two workers planned with the same free bytes."""
        free = [100]

        def allocate(num_bytes: int, **_: object) -> None:
            if num_bytes > free[0]:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 60 bytes.\nmore words")
            free[0] -= num_bytes

        monkeypatch.setattr(torch, "empty", allocate)
        reserve(60, torch.device("cuda", 1))
        with pytest.raises(ConfigError, match=r"cuda:1 had room .*Tried to allocate 60 bytes\.; choose another"):
            reserve(60, torch.device("cuda", 1))

    def test_workers_of_a_host_take_its_gpus_in_turn(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
        assert [pick_device("auto", turn).index for turn in range(5)] == [0, 1, 2, 3, 0]
        assert [pick_device("cuda", turn, 2).index for turn in range(3)] == [0, 2, 0]
        assert [pick_device("cuda", turn, 3).index for turn in range(2)] == [0, 0]
        assert pick_device("cuda:3", 1).index == 3
        assert [num_sharing("auto", turn, 5, 1) for turn in range(5)] == [2, 1, 1, 1, 2]
        assert [num_sharing("cuda", turn, 3, 2) for turn in range(3)] == [2, 1, 2]
        assert num_sharing("cuda:3", 1, 5, 1) == 5
        assert num_sharing("cuda", 3, 1, 1) == 1
        assert pick_device("cpu", 1) == CPU
