"""Which forms of the weights a worker keeps: the fastest that fit into memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tanghulu.errors import ConfigError
from tanghulu.workers.compute import linear
from tanghulu.workers.compute.attention.invariant import InvariantAttention
from tanghulu.workers.compute.device import CpuFeatures
from tanghulu.workers.compute.linear import Arithmetic
from tanghulu.workers.config import WorkerConfig
from tanghulu.workers.engine.kv_layout import KvLayout
from tanghulu.workers.loading import torch_loading
from tanghulu.workers.weights import resolve_model
from tanghulu.workers.weights.source import fingerprint
from tests.workers.tiny import TinyModel, write_tiny


def test_weights_have_one_form_where_two_do_not_fit(tiny: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "this_cpu", lambda: CpuFeatures(native_bfloat16=True, has_fbgemm=True, has_onednn=True))
    config = WorkerConfig(model=str(tiny.path), device="cpu", kv_memory=1 << 20).for_device(on_gpu=False)
    source = resolve_model(str(tiny.path))
    layout = KvLayout.of(source.config, config.block_tokens, "bfloat16")
    placed = torch_loading._Placement.of(config, source)
    assert placed.arithmetic.dtypes == (torch.float32, torch.bfloat16)
    both = torch_loading._plan(config, source, layout, placed).total_bytes

    def fitted(available: int | None) -> Arithmetic:
        monkeypatch.setattr(torch_loading, "free_bytes", lambda device: available)
        return torch_loading._fit(config, source, layout, placed)[0].arithmetic

    assert fitted(both) is fitted(None) is placed.arithmetic
    assert fitted(both - 1).dtypes == (torch.bfloat16,)
    with pytest.raises(ConfigError, match="is available"):
        fitted(config.kv_memory)


def test_invariant_workers_have_one_form_and_an_attention_of_their_own(tiny: TinyModel) -> None:
    config = WorkerConfig(model=str(tiny.path), device="cpu", kv_memory=1 << 20, batch_invariant=True)
    placed = torch_loading._Placement.of(config, resolve_model(str(tiny.path)))
    assert placed.arithmetic.invariant
    assert placed.arithmetic.dtypes == (torch.float32,)
    assert isinstance(placed.attention, InvariantAttention)


@pytest.mark.parametrize("other", [{"engine": "mock"}, {"tp": 2}, {"attention": "varlen"}])
def test_what_is_not_invariant_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--batch-invariant works"):
        WorkerConfig(batch_invariant=True, **other)


def test_kv_of_other_arithmetic_has_another_fingerprint(tiny: TinyModel) -> None:
    source = resolve_model(str(tiny.path))
    names = {fingerprint(source, dtype="float32", block_tokens=8, arithmetic=each) for each in (b"", b"one", b"two")}
    assert len(names) == 3


def test_memory_is_planned_for_the_context_that_the_cache_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not for the million tokens that the model could see: tables and masks of that size fit on few hosts."""
    tiny = write_tiny(tmp_path, max_position_embeddings=1 << 20)
    config = WorkerConfig(model=str(tiny.path), device="cpu", kv_memory=1 << 20)
    contexts: list[int] = []
    monkeypatch.setattr(torch_loading, "load_tokenizer_assets", lambda source: None)
    plan = torch_loading._plan

    def planned(config: Any, source: Any, *rest: Any) -> Any:
        contexts.append(source.config.max_context)
        return plan(config, source, *rest)

    monkeypatch.setattr(torch_loading, "_plan", planned)
    loaded = torch_loading.load(config, lambda fraction: None)
    runner = loaded.make_runner(memoryview(bytearray(1 << 20)))
    assert contexts[0] == runner.max_context == max(4096, runner.cache.num_blocks * config.block_tokens)


def test_a_gpus_memory_is_taken_before_the_weights_are_read(tiny: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """So of two workers that start at once one is refused at once, with the reason."""
    order: list[str] = []
    taken: list[int] = []
    monkeypatch.setattr(torch_loading._Placement, "on_gpu", property(lambda placed: True))
    monkeypatch.setattr(torch_loading, "load_tokenizer_assets", lambda source: None)
    monkeypatch.setattr(torch_loading, "reserve", lambda num_bytes, device: taken.append(num_bytes))
    load_model, cache = torch_loading.load_model, torch_loading.DeviceKvCache
    monkeypatch.setattr(torch_loading, "load_model", lambda *a, **k: (order.append("weights"), load_model(*a, **k))[1])
    monkeypatch.setattr(torch_loading, "DeviceKvCache", lambda *a: (order.append("cache"), cache(*a))[1])
    config = WorkerConfig(model=str(tiny.path), device="cpu", kv_memory=1 << 20, kv_staging=4 << 20)
    recorded: list[int] = []
    monkeypatch.setattr(torch_loading.DeviceRunner, "record", lambda runner, count: recorded.append(count))
    loaded = torch_loading.load(config, lambda fraction: None)
    assert recorded == [128]
    assert order == ["cache", "weights"]
    assert taken[0] > config.kv_memory
    runner = loaded.make_runner(memoryview(b""))
    assert order == ["cache", "weights"], "the runner has the cache that was made before"
    assert runner.cache.num_blocks == loaded.layout.num_blocks_in(1 << 20)


def test_limits_that_are_not_set_are_the_devices(tiny: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    config = WorkerConfig(model=str(tiny.path), device="cpu")
    on_cpu = config.for_device(on_gpu=False)
    assert (on_cpu.kv_memory, on_cpu.max_num_batched_tokens, on_cpu.max_num_seqs) == (1 << 30, 512, 32)
    on_gpu = config.for_device(on_gpu=True)
    assert (on_gpu.max_num_batched_tokens, on_gpu.max_num_seqs) == (2048, 128)
    own = WorkerConfig(kv_memory=5, max_num_batched_tokens=6, max_num_seqs=7)
    assert own.for_device(on_gpu=True) == own == own.for_device(on_gpu=False)


def test_a_gpus_cache_has_most_of_what_the_model_leaves(tiny: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_loading._Placement, "on_gpu", property(lambda placed: True))
    monkeypatch.setattr(torch_loading, "free_bytes", lambda device: 80 << 30)
    monkeypatch.setattr(torch_loading, "total_bytes", lambda device: 80 << 30)
    source = resolve_model(str(tiny.path))
    for ranks in (1, 2):
        config = WorkerConfig(model=str(tiny.path), device="cpu", tp=ranks).for_device(on_gpu=True)
        layout = KvLayout.of(source.config, config.block_tokens, "float32", ranks)
        placed = torch_loading._Placement.of(config, source)
        size = torch_loading._left_bytes(config, source, layout, placed)
        assert 0.85 * (80 << 30) < size / ranks < 0.9 * (80 << 30)
        torch_loading._fit(replace(config, kv_memory=size), source, layout, placed)
        shared = replace(config, device_workers=2)
        monkeypatch.setattr(torch_loading, "num_sharing", lambda *given: given[2])
        assert torch_loading._left_bytes(shared, source, layout, placed) < size / 2, "the other's half is left"
    monkeypatch.setattr(torch_loading, "free_bytes", lambda device: 1 << 20)
    size = torch_loading._left_bytes(config, source, layout, placed)
    with pytest.raises(ConfigError, match=r"the worker needs .* is available"):
        torch_loading._fit(replace(config, kv_memory=size), source, layout, placed)
