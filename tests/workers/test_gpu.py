"""What only a GPU shows: its kernels, its graphs, its copies. Skipped where there is none."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from tanghulu.session.sampling import Sampling
from tanghulu.transfer_engine.core.segment import MemorySegment
from tanghulu.transfer_engine.gpu import staging as gpu_staging
from tanghulu.transfer_engine.gpu.mover import BlockMover
from tanghulu.transfer_engine.gpu.staging import DeviceBlocks, StagingRing, make_copier, pin
from tanghulu.workers.compute.attention.backends import AttentionNeeds, can, pick_attention
from tanghulu.workers.compute.attention.varlen import operator_arguments
from tanghulu.workers.compute.device_sampling import sample_on_device
from tanghulu.workers.compute.forward_batch import SequenceChunk, build_forward_batch
from tanghulu.workers.compute.kv_cache import DeviceKvCache
from tanghulu.workers.compute.linear import Arithmetic
from tanghulu.workers.compute.models.model import Model, load_model
from tanghulu.workers.compute.models.shard import Shard, join, leave
from tanghulu.workers.compute.runners import DeviceRunner
from tanghulu.workers.compute.sampling import SamplingRow
from tanghulu.workers.engine.engine import EngineCore
from tanghulu.workers.engine.kv_layout import KvLayout
from tanghulu.workers.engine.scheduler import EngineCoreConfig
from tanghulu.workers.kv import device_sharing
from tanghulu.workers.kv.device_sharing import CudaIpc, DeviceSharing
from tanghulu.workers.kv.peer_methods import SharedCache
from tanghulu.workers.kv.staging import StagedWindow
from tanghulu.workers.ranks.processes import RankProcesses, RankTask
from tanghulu.workers.weights import resolve_model
from tests.workers.rig import PROMPT, DictStore, Rig
from tests.workers.tiny import (
    BLOCK,
    VOCAB,
    WIDE,
    TinyModel,
    engine,
    request,
    run_all,
    runner_of,
    write_served,
    write_tiny,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="hardware: no GPU, torch.cuda.is_available() is False"),
]

GPU = torch.device("cuda", 0)
#: A cache of 40 blocks, each full of its number, is shared until the end of the input.
_SHARING_PROCESS = """
import sys, msgspec, torch
from tanghulu.workers.kv.device_sharing import CudaIpc
memory = torch.arange(40, device="cuda:0")[:, None].to(torch.uint8).repeat(1, 65_536)
torch.cuda.synchronize()
print(msgspec.json.encode(CudaIpc(memory.device).share(memory)).decode(), flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return write_tiny(tmp_path_factory.mktemp("wide"), **WIDE)


def load(tiny: TinyModel, dtype: torch.dtype, attention: str, block_tokens: int) -> Model:
    source = resolve_model(str(tiny.path))
    needs = AttentionNeeds(GPU, dtype, source.config.head_dim, block_tokens)
    return load_model(source, dtype, device=GPU, attention=pick_attention(attention, needs))


def device_engine(model: Model, block_tokens: int = BLOCK, graphs: bool = True, num_blocks: int = 64) -> EngineCore:
    runner = runner_of(DeviceRunner, model, block_tokens=block_tokens, num_blocks=num_blocks, graphs=graphs)
    config = EngineCoreConfig(block_tokens=block_tokens, max_num_batched_tokens=64, max_num_seqs=8, debug_checks=True)
    return EngineCore(runner, config)


def texts(core: EngineCore, block_tokens: int = BLOCK) -> dict[str, list[int]]:
    random_ = random.Random(4)
    shared = random_.choices(range(2, VOCAB), k=20)
    for index, length in enumerate((1, 7, 30, 75, 12, 40)):
        prompt = [*shared[: index * 4], *random_.choices(range(2, VOCAB), k=length)]
        sampling = Sampling(temperature=index % 2, top_k=20, seed=index)
        core.add(request(str(index), prompt, 12, block_tokens=block_tokens, sampling=sampling))
    return run_all(core)


@pytest.mark.parametrize("attention", ["auto", "varlen", "sdpa"])
@pytest.mark.parametrize("block_tokens", [16, 256])
def test_logits_are_those_of_transformers(wide: TinyModel, attention: str, block_tokens: int):
    """A prompt in three runs; transformers in float32 on the CPU, ours in bfloat16."""
    tokens = random.Random(1).choices(range(2, VOCAB), k=700)
    with torch.inference_mode():
        wanted = wide.reference()(torch.tensor([tokens])).logits[0]
    model = load(wide, torch.bfloat16, attention, block_tokens)
    cache = DeviceKvCache(KvLayout.of(model.config, block_tokens, "bfloat16"), 64, GPU)
    blocks = random.Random(2).sample(range(64), -(-700 // block_tokens))
    for start, end in ((0, 300), (300, 699), (699, 700)):
        batch = build_forward_batch([SequenceChunk(tokens[start:end], start, blocks, True)], block_tokens, GPU)
        got = model.forward(batch, cache)[0].float().cpu()
        assert float((got - wanted[end - 1]).abs().max() / wanted[end - 1].abs().max()) < 0.05


def test_float32_gives_the_text_of_the_cpu(tiny: TinyModel, tiny_model: Model):
    assert texts(device_engine(load(tiny, torch.float32, "auto", BLOCK))) == texts(engine(tiny_model))


@pytest.mark.parametrize(("dtype", "block_tokens"), [(torch.float32, BLOCK), (torch.bfloat16, 256)])
def test_graphs_compute_what_is_computed_without(wide: TinyModel, dtype: torch.dtype, block_tokens: int):
    model = load(wide, dtype, "auto", block_tokens)
    with_graphs = device_engine(model, block_tokens)
    assert isinstance(with_graphs.runner, DeviceRunner)
    with_graphs.runner.record(8)
    assert texts(with_graphs, block_tokens) == texts(device_engine(model, block_tokens, graphs=False), block_tokens)
    assert isinstance(with_graphs.runner, DeviceRunner)
    recorded = with_graphs.runner._graphs
    assert recorded is not None
    assert recorded._graphs, "steps were replayed"
    assert not recorded._failed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kept_as", [None, torch.int8])
@pytest.mark.parametrize(("head_dim", "block_tokens"), [(64, 16), (80, 24), (128, 64), (256, 256)])
def test_decodes_are_attended_by_tables(
    dtype: torch.dtype, kept_as: torch.dtype | None, head_dim: int, block_tokens: int
):
    for has_windows in (False, True):
        assert can("triton", AttentionNeeds(GPU, dtype, head_dim, block_tokens, has_windows, kept_as)) is None


def test_there_is_a_kernel_that_reads_blocks_of_256_tokens():
    """Else every decode step gathers, as docs/workers.md says of torch before 2.12."""
    needs = AttentionNeeds(GPU, torch.bfloat16, 128, 256)
    assert can("varlen", needs) is None
    backend = pick_attention("varlen", needs)
    assert backend._kernel.reads_tables == ("block_table" in operator_arguments())  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_sampling_waits_once(monkeypatch: pytest.MonkeyPatch):
    rows = [
        SamplingRow(Sampling(seed=seed, top_k=5 * (seed % 2), num_logprobs=2), [seed], 1, frozenset())  # type: ignore[arg-type]
        for seed in range(8)
    ]
    logits = torch.randn(8, 1000, device=GPU)
    waits: list[int] = []
    to_cpu = torch.Tensor.cpu

    def allowed(tensor: torch.Tensor) -> torch.Tensor:
        torch.cuda.set_sync_debug_mode("default")
        waits.append(1)
        return to_cpu(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", allowed)
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert len(sample_on_device(logits, rows).tokens) == 8
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert waits == [1]


class TestStaging:
    def _blocks(self, num_parts: int = 1) -> tuple[DeviceBlocks, torch.Tensor]:
        memory = torch.randint(0, 256, (40, 65_536), dtype=torch.uint8, device=GPU)
        return DeviceBlocks(list(memory.chunk(num_parts, dim=1))), memory

    @pytest.mark.parametrize(("num_parts", "least_piece"), [(1, 1), (1, 1 << 20), (16, 1), (16, 1 << 20)])
    def test_bytes_go_out_and_come_back(self, monkeypatch: pytest.MonkeyPatch, num_parts: int, least_piece: int):
        """Piece by piece, and put together on the device."""
        monkeypatch.setattr(gpu_staging, "LEAST_PIECE_BYTES", least_piece)
        blocks, memory = self._blocks(num_parts)
        before = memory.cpu()
        port = BlockMover(blocks, [StagingRing(GPU, 10 * 65_536, make_copier(GPU, settled=True))])
        seen: list[bytes] = []
        order = random.Random(3).sample(range(40), 33)
        assert port.drain(order, lambda at, buffers: seen.extend(map(bytes, buffers)) or len(buffers)) == 33
        assert seen == [before[block].numpy().tobytes() for block in order]

        def back(at: int, buffers: list[memoryview]) -> int:
            for index, buffer in enumerate(buffers):
                buffer[:] = seen[at + index]
            return len(buffers)

        memory.zero_()
        torch.cuda.synchronize()
        assert port.fill(order[::-1], lambda at, buffers: back(33 - at - len(buffers), buffers[::-1])) == 33
        torch.cuda.synchronize()
        after = memory.cpu()
        assert all(torch.equal(after[block], before[block]) for block in order)

    def test_other_workers_read_a_pinned_segment(self):
        blocks, memory = self._blocks()
        segment = MemorySegment.create("gpu-test", 5 * 65_536)
        unpin = pin(segment.view)
        window = StagedWindow(blocks, segment.view, make_copier(GPU, settled=True))
        offsets = window.take([7, 3, 9])
        views = window.show([7, 3, 9], offsets)
        assert [bytes(view) for view in views] == [memory[block].cpu().numpy().tobytes() for block in (7, 3, 9)]
        del views
        unpin()

    @pytest.mark.parametrize("least_piece", [1, 1 << 20])
    def test_blocks_are_read_from_the_cache_of_another_process(self, monkeypatch: pytest.MonkeyPatch, least_piece: int):
        monkeypatch.setattr(device_sharing, "LEAST_PIECE_BYTES", least_piece)
        command = [sys.executable, "-c", _SHARING_PROCESS]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            shared = msgspec.json.decode(other.stdout.readline(), type=SharedCache)
            memory = torch.zeros(8, 65_536, dtype=torch.uint8, device=GPU)
            torch.cuda.synchronize()
            sharing = DeviceSharing(memory, CudaIpc(GPU))
            theirs = sharing.open(shared)
            sharing.copy(theirs, [39, 0, 7], [2, 0, 6])
            assert [row.tolist() for row in memory[:, ::65_535]] == [[each, each] for each in (0, 0, 39, 0, 0, 0, 7, 0)]
            sharing.wipe([2])
            assert not memory[2].any()
            del theirs
            other.communicate()
        assert other.returncode == 0

    def test_a_prefix_comes_from_the_store(self, tiny: TinyModel, tiny_model: Model):
        """Written by an engine on the CPU, read by one on the GPU, and the other way round."""
        store, model = DictStore(), load(tiny, torch.float32, "auto", BLOCK)
        runner = runner_of(DeviceRunner, model, block_tokens=BLOCK, num_blocks=64)
        parts = DeviceBlocks([runner.cache.memory])
        rings = [StagingRing(GPU, 6 * parts.block_bytes, make_copier(GPU, settled=True)) for _ in range(4)]
        on_gpu = Rig(model, store, runner=runner, port=BlockMover(parts, rings))
        on_cpu = Rig(tiny_model, store)
        text, _ = on_cpu.run("one", PROMPT, 4)
        on_cpu.run_until_idle()
        assert on_gpu.run("two", PROMPT, 4) == (text, 5 * BLOCK)
        longer = [*PROMPT, *text, *range(10, 40)]
        wanted, _ = on_gpu.run("three", longer, 4)
        on_gpu.run_until_idle()
        on_cpu.drop()
        got, cached = on_cpu.run("four", longer, 4)
        assert (got, cached) == (wanted, len(longer) // BLOCK * BLOCK)
        on_gpu.close()
        on_cpu.close()


@pytest.fixture
def two_ranks(wide: TinyModel) -> Iterator[tuple[EngineCore, DeviceBlocks]]:
    if torch.cuda.device_count() < 2:
        pytest.skip("hardware: one GPU, tensor parallelism needs two")
    source = resolve_model(str(wide.path))
    ranks = RankProcesses(
        RankTask(
            str(wide.path),
            KvLayout.of(source.config, BLOCK, "float32", 2),
            torch.float32,
            Arithmetic.of(torch.float32, GPU),
            1,
            GPU,
        )
    )
    try:
        model = load_model(source, torch.float32, shard=Shard(0, 2), device=GPU)
        ranks.wait_loaded()
        torch.cuda.set_device(GPU)
        join(0, 2, ranks.meeting_file, GPU)
        runner = runner_of(DeviceRunner, model, block_tokens=BLOCK, num_blocks=64, num_parts=2, announce=ranks.send)
        blocks = DeviceBlocks([runner.cache.memory, *ranks.open_caches(64)])
        yield (
            EngineCore(runner, EngineCoreConfig(block_tokens=BLOCK, max_num_batched_tokens=64, debug_checks=True)),
            blocks,
        )
    finally:
        ranks.close()
        leave()


def test_two_ranks_give_the_text_of_one(two_ranks: tuple[EngineCore, DeviceBlocks], wide: TinyModel):
    core, blocks = two_ranks
    assert texts(core) == texts(device_engine(load(wide, torch.float32, "auto", BLOCK)))
    port = BlockMover(blocks, [StagingRing(GPU, 4 * blocks.block_bytes, make_copier(GPU, settled=True))])
    seen: list[bytes] = []
    used = [block for block in range(64) if core.scheduler.pool._hashes[block] is not None]
    port.drain(used[:3], lambda at, buffers: seen.extend(map(bytes, buffers)) or len(buffers))
    assert all(any(whole[: len(whole) // 2]) and any(whole[len(whole) // 2 :]) for whole in seen), "both ranks' parts"


def test_a_worker_serves_from_a_gpu(tmp_path: Path):
    """What `tanghulu worker --device cuda` loads: the plan, the kernel, the runner, the ways in and out."""
    from tanghulu.workers.config import WorkerConfig
    from tanghulu.workers.loading.torch_loading import load as load_worker

    config = WorkerConfig(
        model=str(write_served(tmp_path).path), device="cuda:0", kv_memory=256 << 20, kv_staging=256 << 20
    )
    loaded = load_worker(config, lambda fraction: None)
    assert loaded.staging is not None
    assert loaded.layout.dtype == "bfloat16"
    segment = MemorySegment.create("gpu-worker", loaded.staging.segment_bytes)
    runner = loaded.make_runner(segment.view)
    ports = loaded.staging.open(runner, None, segment.view)
    core = EngineCore(runner, EngineCoreConfig(block_tokens=64))
    core.add(request("one", range(100, 300), 8, block_tokens=64))
    assert len(run_all(core)["one"]) == 8
    assert ports.port.drain([0, 1], lambda at, buffers: len(buffers)) == 2
    loaded.staging.close()
