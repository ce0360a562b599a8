"""Result of loading a model, for any engine."""

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
    """A model in memory, with its name, layout, fingerprint and tokenizer.

    ``make_runner`` lays its KV cache out in the given buffer. With ``staging`` it keeps the cache on a device of its
    own instead, and the buffer is memory through which blocks are offered to other workers.
    """

    name: str
    layout: KvLayout
    fingerprint: Fingerprint
    assets: TokenizerAssets
    make_runner: Callable[[memoryview], ModelRunner]
    ranks: RankProcesses | None = None
    staging: KvStaging | None = None


class KvStaging(Protocol):
    """Pinned memory through which blocks on a device go to and from the outside."""

    @property
    def segment_bytes(self) -> int:
        """Bytes of the segment offered to other workers."""

    def open(self, runner: ModelRunner, ranks: RankProcesses | None, segment: memoryview) -> KvPorts:
        """Make the ports of the runner's cache and the ranks'; other workers read ``segment``."""

    def close(self) -> None:
        """Release the state of `open`; call it before the segment is closed."""
