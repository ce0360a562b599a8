"""Reads a model's files for the torch engine. Imported in a thread: torch alone takes seconds."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import torch

from tanghulu.workers.assembly import LoadedModel
from tanghulu.workers.kv_layout import KvLayout
from tanghulu.workers.memory_plan import MemoryPlan, available_bytes
from tanghulu.workers.models.linear import compute_dtype
from tanghulu.workers.models.registry import dtype_name, load_model, pick_dtype
from tanghulu.workers.models.shard import Shard, require_split
from tanghulu.workers.profiled_runner import ProfiledRunner
from tanghulu.workers.rank_processes import RankProcesses
from tanghulu.workers.threaded_runner import ThreadedRunner
from tanghulu.workers.tokenizer_assets import load_tokenizer_assets
from tanghulu.workers.torch_runner import TorchRunner
from tanghulu.workers.weights.fingerprint import fingerprint
from tanghulu.workers.weights.source import resolve_model

if TYPE_CHECKING:
    from tanghulu.workers.engine import ModelRunner
    from tanghulu.workers.main import WorkerConfig
    from tanghulu.workers.models.registry import Model
    from tanghulu.workers.weights.source import ModelSource

_log = structlog.get_logger(__name__)


def load(config: WorkerConfig, progress: Callable[[float], None]) -> LoadedModel:
    """Read the model's files; takes seconds. Raises ModelUnsupported or ConfigError."""
    source = resolve_model(config.model)
    require_split(source.config, config.tp)
    assets = load_tokenizer_assets(source)
    dtype = pick_dtype(config.dtype)
    layout = KvLayout.of(source.config, config.block_tokens, dtype_name(dtype), config.tp)
    layout.num_blocks_in(config.kv_memory)  # refuse what cannot fit before the long part
    _require_memory(config, source, dtype)
    threads = max(1, (config.threads or len(os.sched_getaffinity(0))) // config.tp)
    torch.set_num_threads(threads)
    model, ranks = _load_shards(config, source, dtype, threads, progress)
    name = fingerprint(source, dtype=layout.dtype, block_tokens=config.block_tokens, tp_size=config.tp)

    def make_runner(buffer: memoryview) -> ModelRunner:
        runner = TorchRunner(
            model,
            block_tokens=config.block_tokens,
            kv_capacity_bytes=buffer.nbytes,
            cache_buffer=buffer,
            num_parts=config.tp,
            announce=None if ranks is None else ranks.send,
        )
        seen: ModelRunner = ProfiledRunner(runner, Path(config.profile)) if config.profile else runner
        return ThreadedRunner(seen, threads) if threads > 1 and ranks is None else seen

    return LoadedModel(source.name, layout, name, assets, make_runner, ranks)


def _require_memory(config: WorkerConfig, source: ModelSource, dtype: torch.dtype) -> None:
    plan = MemoryPlan.of(
        source.config,
        kv_bytes=config.kv_memory,
        num_batched_tokens=config.max_num_batched_tokens,
        num_seqs=config.max_num_seqs,
        stored_item_bytes=dtype.itemsize,
        computed_item_bytes=compute_dtype(dtype).itemsize,
        num_ranks=config.tp,
    )
    _log.info("memory.planned", plan=str(plan), total_bytes=plan.total_bytes)
    plan.require(available_bytes())


def _load_shards(
    config: WorkerConfig, source: ModelSource, dtype: torch.dtype, threads: int, progress: Callable[[float], None]
) -> tuple[Model, RankProcesses | None]:
    """Rank 0's share here and the others' in processes of their own, all in one group."""
    if config.tp == 1:
        return load_model(source, dtype, progress), None
    from tanghulu.workers.rank_group import join

    ranks = RankProcesses(config.model, config.dtype, config.block_tokens, config.tp, threads)
    try:
        model = load_model(source, dtype, progress, Shard(0, config.tp))
        ranks.wait_loaded()
        join(0, config.tp, ranks.meeting_file)
    except BaseException:
        ranks.close()
        raise
    return model, ranks
