"""The contract of a routing policy: frozen views in, a decision out. No clock, no I/O, no randomness but a seeded one.

The same classes run live, in replay (virtual time) and in tests. The dispatcher builds the views: only workers that are
alive and serve the model; ``can_prefill`` and ``can_decode`` already say that with one kind alone alive it does both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tanghulu.types import InstanceId


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker as routing sees it: its last report plus what was sent to it since. Speeds are 0 while unknown."""

    id: InstanceId
    can_prefill: bool
    can_decode: bool
    queue_tokens: int = 0
    num_requests: int = 0
    blocks_free: int = 0
    blocks_total: int = 0
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    store_bytes_per_s: float = 0.0
    hit_blocks: int = 0


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request as routing sees it. ``store_hit_blocks``: leading blocks that the store can give to any worker."""

    num_tokens: int
    block_tokens: int
    block_bytes: int
    store_hit_blocks: int = 0

    @property
    def num_blocks(self) -> int:
        """Blocks that the request needs, a partial last one included."""
        return -(-self.num_tokens // self.block_tokens)


@dataclass(frozen=True, slots=True)
class Candidate:
    """What a policy thought of one worker for one phase; ``terms`` are for people. The lowest score wins."""

    worker: InstanceId
    phase: str
    score: float
    terms: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """The worker that prefills and the one that decodes (it may be the same), and why."""

    prefill: InstanceId
    decode: InstanceId
    candidates: tuple[Candidate, ...] = ()


class Policy(Protocol):
    """A routing policy."""

    name: str

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Decision | None:
        """Workers for both phases; None if nobody can take one of them."""
        ...

    def choose_decode(self, request: RequestView, workers: Sequence[WorkerView]) -> InstanceId | None:
        """A worker that goes on with KV which is held elsewhere; None if there is none."""
        ...


def prefillers(workers: Sequence[WorkerView]) -> list[WorkerView]:
    """Those that may prefill."""
    return [w for w in workers if w.can_prefill]


def decoders(workers: Sequence[WorkerView]) -> list[WorkerView]:
    """Those that may decode."""
    return [w for w in workers if w.can_decode]


def best(candidates: Sequence[Candidate]) -> Candidate | None:
    """The candidate of least score; equal ones by id, so that a decision can be repeated."""
    return min(candidates, key=lambda c: (c.score, c.worker), default=None)
