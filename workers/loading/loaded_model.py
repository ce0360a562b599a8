"""What loading a model yields, whichever engine will run it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tanghulu.types import Fingerprint
from tanghulu.workers.engine.engine import ModelRunner
from tanghulu.workers.engine.kv_layout import KvLayout
from tanghulu.workers.kv.ports import KvPorts
from tanghulu.workers.ranks.processes import RankProcesses
from tanghulu.workers.weights.tokenizer_assets import TokenizerAssets


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory and what names it.

    ``make_runner`` lays its KV cache out in the buffer that it is given. With ``staging`` it keeps the cache on a
    device of its own instead, and the buffer is memory through which blocks are offered to other workers.
    """

    name: str
    layout: KvLayout
    fingerprint: Fingerprint
    assets: TokenizerAssets
    make_runner: Callable[[memoryview], ModelRunner]
    ranks: RankProcesses | None = None
    staging: KvStaging | None = None


class KvStaging(Protocol):
    """How blocks on a device meet the outside."""

    @property
    def segment_bytes(self) -> int:
        """How much memory to offer to other workers."""
        ...

    def open(self, runner: ModelRunner, ranks: RankProcesses | None, segment: memoryview) -> KvPorts:
        """The ways in and out of the runner's cache and the ranks', ``segment`` being what other workers read."""
        ...

    def close(self) -> None:
        """Give up what `open` took, before the segment goes."""
        ...
