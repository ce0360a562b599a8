"""On a GPU: int8, batch invariance, drafts, experts, windows, and KV that moves beside recorded steps."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tanghulu.session.sampling import Sampling
from tanghulu.transfer_engine.core.segment import MemorySegment
from tanghulu.workers.compute.attention.backends import AttentionNeeds, pick_attention
from tanghulu.workers.compute.attention.invariant import InvariantAttention
from tanghulu.workers.compute.forward_batch import SequenceChunk, build_forward_batch
from tanghulu.workers.compute.kv_cache import DeviceKvCache
from tanghulu.workers.compute.linear import Arithmetic
from tanghulu.workers.compute.models.model import Model, load_model
from tanghulu.workers.compute.runners import DeviceRunner
from tanghulu.workers.engine.engine import EngineCore, ModelRunner
from tanghulu.workers.engine.kv_layout import KvLayout
from tanghulu.workers.engine.ngram_drafts import NgramProposer
from tanghulu.workers.engine.scheduler import EngineCoreConfig
from tanghulu.workers.kv.staging import DeviceStaging
from tanghulu.workers.loading.invariance import require_invariance
from tanghulu.workers.weights import resolve_model
from tests.workers.compute.test_architectures import reference, write
from tests.workers.tiny import BLOCK, VOCAB, WIDE, TinyModel, request, run_all, runner_of, write_tiny
from tests.workers.ways import WAYS, Served

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="hardware: no GPU, torch.cuda.is_available() is False"),
]

GPU = torch.device("cuda", 0)
PHRASE = [7, 8, 9, 10, 11, 12]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return write_tiny(tmp_path_factory.mktemp("wide"), **WIDE)


def load(path: Path, dtype: torch.dtype, *, invariant: bool = False) -> Model:
    source = resolve_model(str(path))
    needs = AttentionNeeds(GPU, dtype, source.config.head_dim, BLOCK, source.config.sliding is not None)
    attention = InvariantAttention() if invariant else pick_attention("auto", needs)
    arithmetic = Arithmetic.of(dtype, GPU, invariant=invariant)
    return load_model(source, dtype, device=GPU, attention=attention, arithmetic=arithmetic)


def logits(model: Model, tokens: Sequence[int], ends: Sequence[int], kv_dtype: str) -> torch.Tensor:
    """Logits of the last token of each chunk, over shuffled blocks full of NaN."""
    cache = DeviceKvCache(KvLayout.of(model.config, BLOCK, kv_dtype), 96, model.device)
    cache.memory.fill_(0xFF)
    blocks = random.Random(2).sample(range(96), -(-len(tokens) // BLOCK))
    rows = []
    for start, end in zip([0, *ends], ends, strict=False):
        batch = build_forward_batch([SequenceChunk(tokens[start:end], start, blocks, True)], BLOCK, model.device)
        rows.append(model.forward(batch, cache)[0].float().cpu())
    return torch.stack(rows)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 0.05), (torch.bfloat16, 0.1)])
def test_int8_kv_is_near_what_is_kept_whole(wide: TinyModel, dtype: torch.dtype, bound: float):
    tokens = random.Random(1).choices(range(2, VOCAB), k=400)
    ends = (150, 399, 400)
    wanted = logits(load_model(resolve_model(str(wide.path)), torch.float32), tokens, ends, "float32")
    got = logits(load(wide.path, dtype), tokens, ends, "int8")
    assert float((got - wanted).norm() / wanted.norm()) < bound


@pytest.mark.parametrize("variant", ["mixtral", "qwen3-moe", "qwen3-moe-fused", "gemma3"])
def test_experts_and_windows_give_the_logits_of_transformers(tmp_path: Path, variant: str):
    path = write(tmp_path, variant)
    tokens = random.Random(1).choices(range(2, VOCAB), k=150)
    ends = (60, 61, 149, 150)
    with torch.inference_mode():
        wanted = reference(path)(torch.tensor([tokens])).logits[0][[end - 1 for end in ends]]
    torch.testing.assert_close(logits(load(path, torch.float32), tokens, ends, "float32"), wanted, atol=1e-3, rtol=1e-3)
    near = logits(load(path, torch.bfloat16), tokens, ends, "bfloat16")
    assert float((near - wanted).norm() / wanted.norm()) < 0.1


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
def test_batch_invariance_holds_or_is_refused_at_start(wide: TinyModel, kv_dtype: str):
    """The trial that a worker makes; here it must not refuse."""
    dtype = torch.float32 if kv_dtype == "float32" else torch.bfloat16
    assert len(require_invariance(load(wide.path, dtype, invariant=True), 1, kv_dtype)) == 16


def _runner(model: Model, block_tokens: int, num_blocks: int) -> ModelRunner:
    runner: ModelRunner = runner_of(DeviceRunner, model, block_tokens=block_tokens, num_blocks=num_blocks)
    return runner


@pytest.mark.parametrize("way", WAYS)
def test_invariant_requests_are_the_same_bits_in_every_way(wide: TinyModel, way: str):
    """With drafts too."""
    made: Any = [([5 + index, *PHRASE * (2 + index)], Sampling(temperature=0, num_logprobs=2)) for index in range(4)]
    model = load(wide.path, torch.bfloat16, invariant=True)
    alone = Served(model, made, num_new=11, make_runner=_runner).alone()
    assert WAYS[way](Served(model, made, num_new=11, make_runner=_runner, proposer=NgramProposer(5))) == alone


def _core(model: Model, **more: Any) -> EngineCore:
    runner = runner_of(DeviceRunner, model, block_tokens=BLOCK, num_blocks=64)
    return EngineCore(
        runner, EngineCoreConfig(block_tokens=BLOCK, max_num_batched_tokens=64, debug_checks=True, **more)
    )


def _texts(core: EngineCore) -> dict[str, list[int]]:
    for index in range(4):
        core.add(request(str(index), [5 + index, *PHRASE * (2 + index)], 16))
    return run_all(core)


def test_drafts_change_no_greedy_text(wide: TinyModel):
    model = load(wide.path, torch.float32)
    assert _texts(_core(model, proposer=NgramProposer(5))) == _texts(_core(model))


def test_kv_moves_while_steps_are_recorded_and_replayed(wide: TinyModel):
    """By the rings and the window of `DeviceStaging`, over blocks of no request: the bytes, and the text."""
    model = load(wide.path, torch.float32)
    wanted = _texts(_core(model))
    core = _core(model)
    cache = core.runner.cache
    assert isinstance(cache, DeviceKvCache)
    cache.memory[60:64] = torch.randint(0, 256, cache.memory[60:64].shape, dtype=torch.uint8).to(GPU)
    before = [cache.memory[block].cpu().numpy().tobytes() for block in range(60, 64)]
    staging = DeviceStaging(core.runner.layout, GPU, 64 * core.runner.layout.block_bytes)
    segment = MemorySegment.create("gpu-moves", staging.segment_bytes)
    ports = staging.open(core.runner, None, segment.view)
    ended, failed = threading.Event(), list[str]()

    def move() -> None:
        while not ended.is_set():
            ports.port.drain(range(60, 64), lambda at, buffers: check(at, buffers) or len(buffers))
            ports.port.fill(range(60, 64), lambda at, buffers: write_back(at, buffers) or len(buffers))
            offsets = ports.window.take([60, 63])
            check(0, ports.window.show([60], offsets[:1]))
            check(3, ports.window.show([63], offsets[1:]))
            for offset in offsets:
                ports.window.give_back(offset)

    def check(at: int, buffers: Sequence[memoryview]) -> None:
        failed.extend(f"block {60 + at + i}" for i, each in enumerate(buffers) if bytes(each) != before[at + i])

    def write_back(at: int, buffers: Sequence[memoryview]) -> None:
        for index, buffer in enumerate(buffers):
            buffer[:] = before[at + index]

    threads = [threading.Thread(target=move) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        assert _texts(core) == wanted
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert failed == []
    staging.close()
