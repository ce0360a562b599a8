"""Reads a model's files for the torch engine. Imported in a thread: torch alone takes seconds."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from tanghulu.workers.assembly import LoadedModel
from tanghulu.workers.kv_layout import KvLayout
from tanghulu.workers.models.registry import dtype_name, load_model, pick_dtype
from tanghulu.workers.tokenizer_assets import load_tokenizer_assets
from tanghulu.workers.torch_runner import TorchRunner
from tanghulu.workers.weights.fingerprint import fingerprint
from tanghulu.workers.weights.source import resolve_model

if TYPE_CHECKING:
    from tanghulu.workers.main import WorkerConfig


def load(config: WorkerConfig, progress: Callable[[float], None]) -> LoadedModel:
    """Read the model's files; takes seconds. Raises ModelUnsupported or ConfigError."""
    torch.set_num_threads(config.threads or os.cpu_count() or 1)
    source = resolve_model(config.model)
    assets = load_tokenizer_assets(source)
    dtype = pick_dtype(config.dtype)
    layout = KvLayout.of(source.config, config.block_tokens, dtype_name(dtype))
    layout.num_blocks_in(config.kv_memory)  # refuse what cannot fit before the long part
    model = load_model(source, dtype, progress)
    name = fingerprint(source, dtype=layout.dtype, block_tokens=config.block_tokens)

    def make_runner(buffer: memoryview) -> TorchRunner:
        return TorchRunner(
            model, block_tokens=config.block_tokens, kv_capacity_bytes=buffer.nbytes, cache_buffer=buffer
        )

    return LoadedModel(source.name, layout, name, assets, make_runner)
