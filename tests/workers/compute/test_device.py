"""The runner for devices, on main memory: the same text as the runner for CPUs, whatever is scheduled."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tanghulu.errors import ConfigError
from tanghulu.session.sampling import Sampling
from tanghulu.workers.compute import device as device_module
from tanghulu.workers.compute.attention.base import AttentionBackend, SdpaAttention
from tanghulu.workers.compute.attention.varlen import Kernel, VarlenAttention
from tanghulu.workers.compute.device import CPU, describe_device, device_of_rank, free_bytes, pick_device
from tanghulu.workers.compute.memory_plan import MemoryPlan
from tanghulu.workers.compute.models.model import Model, load_model, pick_dtype
from tanghulu.workers.compute.runners import DeviceRunner
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
