"""Result of loading a model, for any engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tanghulu.model_files.assets import TokenizerAssets
from tanghulu.types import Fingerprint
from tanghulu.workers.engine.engine import ModelRunner
from tanghulu.workers.engine.kv_layout import KvLayout
from tanghulu.workers.ranks.processes import RankProcesses

if TYPE_CHECKING:
    from tanghulu.workers.config import WorkerConfig
    from tanghulu.workers.kv.staging import DeviceStaging  # it imports torch


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory, with its name, layout, fingerprint and tokenizer.

    ``config`` has the limits that its device decided.
    ``make_runner`` lays its KV cache out in the given buffer. With ``staging`` it keeps the cache on a device of its
    own instead, and the buffer is memory through which blocks are offered to other workers.
    """

    config: WorkerConfig
    name: str
    layout: KvLayout
    fingerprint: Fingerprint
    assets: TokenizerAssets
    make_runner: Callable[[memoryview], ModelRunner]
    ranks: RankProcesses | None = None
    staging: DeviceStaging | None = None
