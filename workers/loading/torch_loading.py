"""Reads a model's files for the torch engine. Imported in a thread: torch alone takes seconds."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import torch

from tanghulu.workers.compute.attention.backends import AttentionNeeds, pick_attention
from tanghulu.workers.compute.attention.base import MAX_GATHERED_TOKENS, AttentionBackend
from tanghulu.workers.compute.attention.invariant import InvariantAttention
from tanghulu.workers.compute.device import (
    describe_device,
    device_of_rank,
    free_bytes,
    num_sharing,
    pick_device,
    reserve,
    total_bytes,
)
from tanghulu.workers.compute.kv_cache import DeviceKvCache, gathered_item_bytes
from tanghulu.workers.compute.linear import Arithmetic
from tanghulu.workers.compute.memory_plan import MemoryPlan
from tanghulu.workers.compute.models.model import dtype_name, kv_dtype_name, load_model, pick_dtype
from tanghulu.workers.compute.models.shard import WHOLE, Shard, join, require_split
from tanghulu.workers.compute.runners import DeviceRunner, ProfiledRunner, ThreadedRunner, TorchRunner
from tanghulu.workers.engine.kv_layout import KvLayout
from tanghulu.workers.kv.staging import DeviceStaging
from tanghulu.workers.loading.invariance import require_invariance
from tanghulu.workers.loading.loaded_model import LoadedModel
from tanghulu.workers.ranks.processes import RankProcesses, RankTask
from tanghulu.workers.weights.source import fingerprint, resolve_model
from tanghulu.workers.weights.tokenizer_assets import load_tokenizer_assets

if TYPE_CHECKING:
    from tanghulu.workers.compute.models.model import Model
    from tanghulu.workers.config import WorkerConfig
    from tanghulu.workers.engine.engine import ModelRunner
    from tanghulu.workers.weights.source import ModelSource

_log = structlog.get_logger(__name__)
#: The context is no longer than the KV cache; not below this, which trials at start need.
_LEAST_CONTEXT = 4096
#: Share of a GPU's memory for KV where --kv-memory sets none, of what the plan leaves.
_SHARE_OF_LEFT = 0.9


@dataclass(frozen=True, slots=True)
class _Placement:
    """Device and types of the model; ``dtype`` is the type of its weights, ``kept_as`` of its KV."""

    device: torch.device
    dtype: torch.dtype
    kept_as: torch.dtype
    arithmetic: Arithmetic
    attention: AttentionBackend

    @classmethod
    def of(cls, config: WorkerConfig, source: ModelSource) -> _Placement:
        """Pick device, type and attention according to the options; raises ConfigError if that is impossible."""
        device = pick_device(config.device, config.device_turn, config.tp)
        device_of_rank(device, config.tp - 1)
        dtype = pick_dtype(config.dtype, device)
        windows = source.config.sliding is not None
        kept_as = getattr(torch, kv_dtype_name(config.kv_dtype, dtype))
        needs = AttentionNeeds(device, dtype, source.config.head_dim, config.block_tokens, windows, kept_as)
        invariant = config.batch_invariant
        attention = InvariantAttention() if invariant else pick_attention(config.attention, needs)
        return cls(device, dtype, kept_as, Arithmetic.of(dtype, device, invariant=invariant), attention)

    @property
    def on_gpu(self) -> bool:
        """Whether the cache is in a memory of its own."""
        return self.device.type != "cpu"


def load(config: WorkerConfig, progress: Callable[[float], None]) -> LoadedModel:
    """Read the model's files; takes seconds. Raises ModelUnsupported or ConfigError."""
    source = resolve_model(config.model, config.lora)
    require_split(source.config, config.tp)
    assets = load_tokenizer_assets(source)
    placed = _Placement.of(config, source)
    layout = KvLayout.of(source.config, config.block_tokens, dtype_name(placed.kept_as), config.tp)
    config = config.for_device(on_gpu=placed.on_gpu)
    if not config.kv_memory:
        config = replace(config, kv_memory=_left_bytes(config, source, layout, placed))
    num_blocks = layout.num_blocks_in(config.kv_memory)  # refuse an impossible size before the long part
    source = source.within(max(num_blocks * config.block_tokens, _LEAST_CONTEXT))
    staging = DeviceStaging(layout, placed.device, config.kv_staging) if placed.on_gpu else None
    placed, plan = _fit(config, source, layout, placed)
    cache = _reserved(plan, layout, num_blocks, placed.device) if placed.on_gpu else None
    threads = max(1, (config.threads or len(os.sched_getaffinity(0))) // config.tp)
    torch.set_num_threads(threads)
    model, ranks = _load_shards(config, source, layout, placed, threads, progress)
    name = fingerprint(
        source,
        dtype=layout.dtype,
        block_tokens=config.block_tokens,
        tp_size=config.tp,
        weights_dtype=dtype_name(placed.dtype),
        arithmetic=require_invariance(model, threads, layout.dtype) if config.batch_invariant else b"",
    )

    announce = None if ranks is None else ranks.send
    on_device = None if cache is None else DeviceRunner(model, layout, cache, announce, graphs=config.graphs)
    if on_device is not None:
        on_device.record(config.max_num_seqs)

    def make_runner(buffer: memoryview) -> ModelRunner:
        runner: ModelRunner
        if on_device is not None:
            runner = on_device
        else:
            runner = TorchRunner(model, layout, layout.num_blocks_in(buffer.nbytes), buffer, announce)
        seen: ModelRunner = ProfiledRunner(runner, Path(config.profile)) if config.profile else runner
        return ThreadedRunner(seen, threads) if threads > 1 and ranks is None and not placed.on_gpu else seen

    return LoadedModel(config, source.name, layout, name, assets, make_runner, ranks, staging)


def _left_bytes(config: WorkerConfig, source: ModelSource, layout: KvLayout, placed: _Placement) -> int:
    """Return the memory for KV on a GPU, of all ranks together: most of what is left; at least a block."""
    sharing = num_sharing(config.device, config.device_turn, config.device_workers, config.tp)
    free = min(free_bytes(placed.device) or 0, total_bytes(placed.device) // sharing)
    bounded = source.within(max(free * config.tp // layout.block_bytes * config.block_tokens, _LEAST_CONTEXT))
    left = free - _plan(config, bounded, layout, placed).total_bytes
    return max(layout.block_bytes, int(left * _SHARE_OF_LEFT) * config.tp)


def _fit(
    config: WorkerConfig, source: ModelSource, layout: KvLayout, placed: _Placement
) -> tuple[_Placement, MemoryPlan]:
    """Plan the memory; return ``placed``, with weights in one form where two do not fit. Raises ConfigError."""
    available = free_bytes(placed.device)
    plan = _plan(config, source, layout, placed)
    if not plan.fits(available):
        placed = replace(placed, arithmetic=placed.arithmetic.in_one_form())
        plan = _plan(config, source, layout, placed)
    forms = len(placed.arithmetic.dtypes)
    _log.info(
        "memory.planned",
        device=describe_device(placed.device),
        plan=str(plan),
        total_bytes=plan.total_bytes,
        forms=forms,
    )
    plan.require(available)
    return placed, plan


def _reserved(plan: MemoryPlan, layout: KvLayout, num_blocks: int, device: torch.device) -> DeviceKvCache:
    """Take the planned memory before the long load: the cache, and room for the rest. Raises ConfigError."""
    reserve(plan.kv_bytes + plan.weights_bytes + plan.workspace_bytes, device)
    return DeviceKvCache(layout, num_blocks, device)


def _plan(config: WorkerConfig, source: ModelSource, layout: KvLayout, placed: _Placement) -> MemoryPlan:
    """Plan the memory of this host, or of rank 0's GPU, equal to that of the other ranks."""
    if placed.on_gpu:
        return MemoryPlan.on_gpu(
            source.config,
            kv_bytes=config.kv_memory,
            block_bytes=layout.block_bytes,
            num_batched_tokens=config.max_num_batched_tokens,
            num_seqs=config.max_num_seqs,
            item_bytes=placed.dtype.itemsize,
            gathered_tokens=MAX_GATHERED_TOKENS,
            gathered_item_bytes=gathered_item_bytes(placed.kept_as, placed.dtype),
            has_masks=placed.attention.has_masks,
            has_graphs=config.graphs and config.tp == 1 and not config.batch_invariant,
            num_ranks=config.tp,
        )
    return MemoryPlan.of(
        source.config,
        kv_bytes=config.kv_memory,
        num_batched_tokens=config.max_num_batched_tokens,
        num_seqs=config.max_num_seqs,
        stored_item_bytes=placed.dtype.itemsize,
        computed_item_bytes=placed.arithmetic.item_bytes,
        num_ranks=config.tp,
    )


def _load_shards(
    config: WorkerConfig,
    source: ModelSource,
    layout: KvLayout,
    placed: _Placement,
    threads: int,
    progress: Callable[[float], None],
) -> tuple[Model, RankProcesses | None]:
    """Load rank 0's share here and the others' in processes of their own, all in one group."""
    device, attention, arithmetic = placed.device, placed.attention, placed.arithmetic

    def load_shard(shard: Shard) -> Model:
        return load_model(source, placed.dtype, progress, shard, device, attention, arithmetic=arithmetic)

    if config.tp == 1:
        return load_shard(WHOLE), None
    task = RankTask(config.model, layout, placed.dtype, arithmetic, threads, device, config.attention, config.lora)
    ranks = RankProcesses(replace(task, max_context=source.config.max_context))
    try:
        model = load_shard(Shard(0, config.tp))
        ranks.wait_loaded()
        join(0, config.tp, ranks.meeting_file, device)
    except BaseException:  # including an interrupt: the ranks' processes must not stay; re-raised
        ranks.close()
        raise
    return model, ranks
