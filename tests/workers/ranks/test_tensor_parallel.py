"""Tensor parallelism over gloo: ranks in processes of their own, one KV segment, the same text as without."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from tanghulu.errors import ChecksumMismatch, ChunkNotFound, ConfigError, InvalidRequest, StoreFull
from tanghulu.rpc.fast_port import FastPort
from tanghulu.rpc.fast_server import FastService
from tanghulu.runtime.clock import SystemClock
from tanghulu.session.outputs import KvSource
from tanghulu.store.client.block_store import BlockStore
from tanghulu.store.client.model import Status
from tanghulu.transfer_engine.core.access import AccessTable
from tanghulu.transfer_engine.core.config import ListenOptions
from tanghulu.transfer_engine.core.segment import MemorySegment
from tanghulu.transfer_engine.engine import TransferEngine
from tanghulu.transfer_engine.server import SegmentServer
from tanghulu.types import BlockHash, Fingerprint, InstanceId
from tanghulu.workers.compute.device import CPU
from tanghulu.workers.compute.kv_cache import KvCache
from tanghulu.workers.compute.linear import Arithmetic
from tanghulu.workers.compute.models.model import load_model
from tanghulu.workers.compute.models.shard import Shard, join, leave, require_split
from tanghulu.workers.compute.runners import TorchRunner
from tanghulu.workers.config import WorkerConfig
from tanghulu.workers.engine.engine import EngineCore
from tanghulu.workers.engine.kv_layout import KvLayout, KvMemory
from tanghulu.workers.engine.scheduler import EngineCoreConfig
from tanghulu.workers.kv.peer_reader import PeerReader
from tanghulu.workers.kv.peer_server import KvIdentity, PeerServer
from tanghulu.workers.kv.ports import HostBlocks
from tanghulu.workers.kv.store_adapter import StoreAdapter
from tanghulu.workers.metrics import WorkerMetrics
from tanghulu.workers.ranks.processes import RankProcesses, RankTask
from tanghulu.workers.weights import ModelSource, resolve_model
from tanghulu.workers.weights.source import fingerprint
from tests.workers.compute.test_architectures import write
from tests.workers.peers import export_at
from tests.workers.rig import read_export
from tests.workers.tiny import BLOCK, VOCAB, TinyModel, request, run_all, runner_of, write_tiny

NUM_BLOCKS = 32


def rank_task(model: str, layout: KvLayout) -> RankTask:
    return RankTask(model, layout, torch.float32, Arithmetic.of(torch.float32), 1, CPU)


@contextlib.contextmanager
def sharded(model: str, size: int, block_tokens: int, kv_dtype: str = "float32") -> Iterator[EngineCore]:
    """An engine whose model is shared out over ``size`` ranks: this process and ``size - 1`` others."""
    source = resolve_model(model)
    layout = KvLayout.of(source.config, block_tokens, kv_dtype, size)
    segment = MemorySegment.create("tp", NUM_BLOCKS * layout.block_bytes)
    ranks = RankProcesses(rank_task(model, layout))
    try:
        loaded = load_model(source, torch.float32, shard=Shard(0, size))
        ranks.wait_loaded()
        join(0, size, ranks.meeting_file)
        ranks.map_cache(segment.fd)
        runner = runner_of(
            TorchRunner,
            loaded,
            block_tokens=block_tokens,
            kv_dtype=kv_dtype,
            kv_capacity_bytes=segment.size_bytes,
            buffer=segment.view,
            num_parts=size,
            announce=ranks.send,
        )
        yield EngineCore(
            runner, EngineCoreConfig(block_tokens=block_tokens, max_num_batched_tokens=48, debug_checks=True)
        )
    finally:
        ranks.close()
        leave()


def alone(model: str, block_tokens: int, kv_dtype: str = "float32") -> EngineCore:
    loaded = load_model(resolve_model(model), torch.float32)
    runner = runner_of(TorchRunner, loaded, block_tokens=block_tokens, kv_dtype=kv_dtype, kv_capacity_bytes=64 << 20)
    return EngineCore(runner, EngineCoreConfig(block_tokens=block_tokens, max_num_batched_tokens=48))


def texts(core: EngineCore, block_tokens: int, vocab: int, num_new: int) -> dict[str, list[int]]:
    generator = torch.Generator().manual_seed(5)
    for index, length in enumerate((3, 30, 17, 70)):
        prompt = torch.randint(3, vocab, (length,), generator=generator).tolist()
        core.add(request(f"r{index}", prompt, num_new, block_tokens=block_tokens))
    return run_all(core)


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_two_ranks_write_the_text_of_one_and_each_its_own_part(tiny: TinyModel, kv_dtype: str) -> None:
    expected = texts(alone(str(tiny.path), BLOCK, kv_dtype), BLOCK, VOCAB, 24)
    with sharded(str(tiny.path), 2, BLOCK, kv_dtype) as core:
        assert texts(core, BLOCK, VOCAB, 24) == expected
        cache = core.cache
        assert isinstance(cache, KvCache)
        used = [cache.block_view(block) for block in range(NUM_BLOCKS)]
        parts = [(bytes(block[: len(block) // 2]), bytes(block[len(block) // 2 :])) for block in used if any(block)]
        assert parts
        assert all(any(first) and any(second) and first != second for first, second in parts)


@pytest.mark.slow
@pytest.mark.needs_model
def test_three_ranks_share_out_smollm2(smollm2: ModelSource) -> None:
    expected = texts(alone("smollm2", 64), 64, 40_000, 6)
    with sharded("smollm2", 3, 64) as core:
        assert texts(core, 64, 40_000, 6) == expected


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["qwen3-moe", "gemma3"])
def test_two_ranks_share_out_experts_and_windows(variant: str, tmp_path: Path) -> None:
    path = str(write(tmp_path, variant))
    expected = texts(alone(path, BLOCK), BLOCK, VOCAB, 12)
    with sharded(path, 2, BLOCK) as core:
        assert texts(core, BLOCK, VOCAB, 12) == expected


@pytest.mark.slow
def test_a_rank_that_cannot_load_is_named(tmp_path: Any) -> None:
    write_tiny(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    ranks = RankProcesses(rank_task(str(tmp_path), KvLayout(1, BLOCK, 1, 4, "float32", 2)))
    with pytest.raises(ConfigError, match="rank 1 of 2"):
        ranks.wait_loaded()


@pytest.mark.parametrize(
    ("size", "text"), [(4, "6 attention heads"), (3, "2 KV heads"), (0, "at least 1"), (6, "2 KV heads")]
)
def test_a_split_that_the_heads_do_not_allow_is_refused(tiny: TinyModel, size: int, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        require_split(resolve_model(str(tiny.path)).config, size)
    with pytest.raises(ConfigError, match=text):
        load_model(resolve_model(str(tiny.path)), torch.float32, shard=Shard(0, size))


def test_the_mock_engine_has_no_ranks() -> None:
    with pytest.raises(ConfigError, match="--tp works with --engine torch only"):
        WorkerConfig(engine="mock", tp=2)


def test_kv_of_another_split_has_another_name(tiny: TinyModel) -> None:
    source = resolve_model(str(tiny.path))
    names = {fingerprint(source, dtype="float32", block_tokens=BLOCK, tp_size=size) for size in (1, 2)}
    assert len(names) == 2


def test_a_block_is_the_ranks_parts_one_behind_the_other(tiny: TinyModel) -> None:
    config = resolve_model(str(tiny.path)).config
    whole, split = KvLayout.of(config, BLOCK, "float32"), KvLayout.of(config, BLOCK, "float32", 2)
    assert (split.block_bytes, split.part_bytes * 2, split.num_kv_heads) == (whole.block_bytes, whole.block_bytes, 1)
    memory = bytearray(3 * split.block_bytes)
    for part in (0, 1):
        cache = KvCache(split, 3, memory, part)
        rows = torch.tensor([2 * cache.row_stride + cache.row_of(1, 1) + 5])
        cache.rows.index_fill_(0, rows, float(part + 1))
        assert cache.blocks[2, 1, 1, 5].unique().tolist() == [part + 1]
        assert cache.blocks.count_nonzero() == split.head_dim


class Shelf:
    """What StoreAdapter needs of a client, over a dict with room for ``room`` chunks."""

    def __init__(self, room: int = 100) -> None:
        self.chunks: dict[str, bytes] = {}
        self.room = room
        self.damaged: set[str] = set()

    def put_many(self, items: Sequence[tuple[str, memoryview]], **_: object) -> list[Any]:
        statuses = []
        for key, value in items:
            if len(self.chunks) < self.room:
                self.chunks[key] = bytes(value)
            statuses.append(Status(key, error=None if key in self.chunks else StoreFull("no room")))
        return statuses

    def get_many_into(self, keys: Sequence[str], buffers: Sequence[memoryview], **_: object) -> list[Any]:
        results: list[Any] = []
        for key, buffer in zip(keys, buffers, strict=True):
            if key not in self.chunks:
                results.append(ChunkNotFound(key))
                continue
            buffer[:] = self.chunks[key]
            results.append(ChecksumMismatch(key) if key in self.damaged else len(buffer))
        return results


def _adapter(shelf: Shelf, num_parts: int) -> StoreAdapter:
    return StoreAdapter(BlockStore(shelf), Fingerprint(bytes(16)), 4, num_parts)  # type: ignore[arg-type]


def test_each_rank_stores_its_own_part_and_a_block_needs_all() -> None:
    shelf, hashes = Shelf(), [BlockHash(bytes([number] * 16)) for number in (1, 2, 3)]
    blocks = [memoryview(bytearray([number] * 8 + [number + 10] * 8)) for number in (1, 2, 3)]
    adapter = _adapter(shelf, 2)
    assert adapter.save(hashes, blocks) == 3
    keys = [f"kv/{bytes(8).hex()}/{block_hash.hex()}/{part}" for block_hash in hashes for part in (0, 1)]
    assert list(shelf.chunks) == keys
    assert shelf.chunks[keys[3]] == bytes([12] * 8)
    got = [memoryview(bytearray(16)) for _ in hashes]
    assert adapter.load(hashes, got, set()) == 3
    assert got == blocks
    del shelf.chunks[keys[3]]
    assert adapter.load(hashes, got, set()) == 1
    assert _adapter(shelf, 1).load(hashes[:1], [memoryview(bytearray(8))], set()) == 1


def test_what_arrives_damaged_is_wiped() -> None:
    shelf, hashes = Shelf(), [BlockHash(bytes([number] * 16)) for number in (1, 2, 3)]
    adapter = _adapter(shelf, 1)
    adapter.save(hashes, [memoryview(bytearray(b"\xff" * 8)) for _ in hashes])
    shelf.damaged = {list(shelf.chunks)[1]}
    got = [memoryview(bytearray(8)) for _ in hashes]
    assert adapter.load(hashes, got, set()) == 1
    assert bytes(got[0]) == b"\xff" * 8
    assert bytes(got[1]) == bytes(8), "as float16 those bytes were NaN"


def test_half_a_block_in_a_full_store_does_not_count() -> None:
    adapter = _adapter(Shelf(room=3), 2)
    hashes = [BlockHash(bytes([number] * 16)) for number in (1, 2)]
    assert adapter.save(hashes, [memoryview(bytearray(8)) for _ in hashes]) == 1


@contextlib.asynccontextmanager
async def _peer(layout: KvLayout, name: Fingerprint, run_dir: Path) -> AsyncIterator[KvSource]:
    """A worker's side of the hand-over, without its engine: an address that holds KV called ``name``."""
    clock, size = SystemClock(), 2 * layout.block_bytes
    metrics = WorkerMetrics(CollectorRegistry(), layout, 2)
    access, segment = AccessTable(clock, 1000, size), MemorySegment.create("kv", size)
    window = HostBlocks(KvMemory(layout, 2, segment.view))
    engine: Any = None  # exports are looked for, and none is there
    server = PeerServer(KvIdentity(InstanceId("w1"), 1, name), layout, window, access, clock, metrics, engine)
    listen = ListenOptions(transports=("shm", "tcp"), host="127.0.0.1", unix_path=str(run_dir / "kv.sock"))
    offered = SegmentServer(segment, access, generation=1, host_id="here", listen=listen)
    service = FastService()
    fast_port = FastPort(service, run_dir, "worker")
    address = await fast_port.bind("127.0.0.1", 0)
    await offered.start()
    server.serve(service, offered)
    await fast_port.open()
    try:
        yield export_at(f"{address}|", 1, 8)
    finally:
        await fast_port.close()
        await offered.close()


@pytest.mark.parametrize("other", [{"tp_size": 2}, {"dtype": "int8", "weights_dtype": "float32"}])
async def test_a_peer_with_other_kv_is_refused(tiny: TinyModel, tmp_path: Path, other: dict[str, Any]) -> None:
    """Blocks of --tp 1 and --tp 2 are equally long: without the check the bytes would be taken for the other's."""
    source = resolve_model(str(tiny.path))
    own: dict[str, Any] = {"dtype": "float32", "block_tokens": BLOCK}
    one, two = (fingerprint(source, **own | changes) for changes in ({}, other))
    transfers = TransferEngine(host_id="here", clock=SystemClock())
    async with _peer(KvLayout.of(source.config, BLOCK, "float32"), one, tmp_path) as export:
        for name, error, text in (
            (two, InvalidRequest, "--kv-dtype, block size and --tp must be equal"),
            (one, ChunkNotFound, "export 1"),
        ):
            reader = PeerReader(transfers, "w2", name)
            with pytest.raises(error, match=text):
                await asyncio.to_thread(read_export, reader, export, 0, [memoryview(bytearray(8))])
            reader.close()
    transfers.close()
