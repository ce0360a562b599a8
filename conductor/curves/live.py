"""The hit-rate curves of a running conductor: of each model, from the requests that end, within a bound of memory.

`LiveCurves.add` only queues a request. A thread counts those of the last second: some tens of microseconds each, as
few of their blocks are in the sample (USES_PER_REQUEST). The memory of a model is that of the workers that prefill it
and of the store's nodes, in the model's blocks, as if it were one cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import structlog
from fastapi import APIRouter
from prometheus_client import Counter, Gauge

from tanghulu.conductor.curves.curve import LRU, SIZES, Bounds, ModelCurve, Names
from tanghulu.conductor.dispatch.registry import Registry
from tanghulu.conductor.stories.recorder import EndedRequest
from tanghulu.errors import InvalidRequest, TanghuluError

_log = structlog.get_logger(__name__)
#: Least memory of a model's curve: requests for models beyond that are not counted.
MODEL_BYTES: Final = 8 << 20
#: Blocks of requests that wait to be counted; further requests are dropped from the curves.
MAX_WAITING: Final = 1 << 18
#: Mean number of sampled blocks of a request, the share of them for each miniature, and latest uses for the optimum.
USES_PER_REQUEST: Final = 2.0
MINI_SHARE: Final = 0.15
RECENT_USES: Final = 1 << 16
#: Seconds between two counts, between looks at the store, for which a report is current (and on the dashboard), and
#: between gauges' values.
COUNT_S: Final = 1.0
LOOK_S: Final = 30.0
FRESH_S: Final = 10.0
SHOWN_S: Final = 60.0
GAUGES_S: Final = 300.0
#: Every hour the past weighs this much less: half after a day.
_KEPT: Final = 0.5 ** (1 / 24)
_FADE_S: Final = 3600.0
_DEADLINE_S: Final = 5.0


@dataclass(slots=True)
class StoreState:
    """The store's memory and its nodes' eviction policy; nothing without a store."""

    memory_bytes: int = 0
    ssd_bytes: int = 0
    eviction: str = ""


@dataclass(slots=True)
class _Model:
    """A model's curve, and sums over its requests."""

    curve: ModelCurve
    block_tokens: int
    began_s: float
    requests: int = 0
    sums: dict[str, float] = field(default_factory=dict)

    def add(self, request: EndedRequest) -> None:
        names = _numbers(request.blocks)
        size = request.block_tokens
        num_named = min(len(names), request.prompt_tokens // size)
        self.curve.add(request.tenant, names, request.prompt_tokens, num_named, size)
        self.requests += 1
        for name in ("prompt_tokens", "generated_tokens", "cached_tokens", "ttft_s", "tbt_s"):
            self.sums[name] = self.sums.get(name, 0.0) + getattr(request, name)


class LiveCurves:
    """``memory_bytes`` bounds the memory of all curves; ``eviction`` overrides the store's policy."""

    def __init__(
        self,
        registry: Registry,
        gauge: Gauge,
        counter: Counter,
        memory_bytes: int,
        eviction: str = "",
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry, self._gauge, self._counter = registry, gauge, counter
        self._memory_bytes, self._eviction, self._now = memory_bytes, eviction, now
        self._lock = threading.Lock()
        self._models: dict[str, _Model] = {}
        self._waiting: list[EndedRequest] = []
        self._num_blocks = 0
        self._report: list[dict[str, Any]] = []
        self._reported_s = self._shown_s = -float("inf")
        self._faded_s = now()
        self.store = StoreState()

    @property
    def enabled(self) -> bool:
        """Whether requests are counted at all."""
        return self._memory_bytes > 0

    def add(self, request: EndedRequest) -> None:
        """Queue a request to be counted."""
        if self._num_blocks >= MAX_WAITING:
            self._counter.labels("dropped").inc()
            return
        self._num_blocks += 1 + len(request.blocks)
        self._waiting.append(request)

    async def run(self, look: Callable[[], Awaitable[StoreState]] | None = None) -> None:
        """Count requests until cancelled; ``look`` asks the store, and may raise TanghuluError."""
        looked_s = -float("inf")
        while self.enabled:
            if look is not None and self._now() - looked_s >= LOOK_S:
                looked_s = self._now()
                with contextlib.suppress(TanghuluError, TimeoutError):
                    async with asyncio.timeout(_DEADLINE_S):
                        self.store = await look()
            await self.count()
            if self._now() - self._shown_s >= GAUGES_S and self._models:
                self._shown_s = self._now()
                await self.report()
            await asyncio.sleep(COUNT_S)

    async def count(self) -> None:
        """Count what waits."""
        waiting, self._waiting, self._num_blocks = self._waiting, [], 0
        if waiting:
            await asyncio.to_thread(self._count, waiting, self._memories())

    async def report(self, fresh_s: float = FRESH_S) -> list[dict[str, Any]]:
        """Return the curves of all models, at most ``fresh_s`` old. Raises InvalidRequest if they are disabled."""
        if not self.enabled:
            raise InvalidRequest("hit-rate curves are disabled; start the conductor with --curve-memory above 0")
        if self._now() - self._reported_s >= fresh_s:
            await self.count()
            self._report = await asyncio.to_thread(self._look)
            self._reported_s = self._now()
        return self._report

    @property
    def latest(self) -> list[dict[str, Any]]:
        """The report made last, however old."""
        return self._report

    def _memories(self) -> dict[str, tuple[float, int]]:
        """Return the memory of each model, in blocks, and a block's tokens."""
        blocks, cards = dict[str, float](), {}
        for worker in self._registry.workers.values():
            if worker.card is not None and worker.role.prefills:
                cards[worker.card.model] = worker.card
                blocks[worker.card.model] = blocks.get(worker.card.model, 0.0) + worker.load.reported.blocks_total
        for name, card in cards.items():
            blocks[name] += self.store.memory_bytes / card.block_bytes if card.block_bytes else 0.0
        return {name: (blocks[name], card.block_tokens) for name, card in cards.items()}

    def _bounds(self, num_models: int) -> Bounds:
        return Bounds.of_bytes(0.8 * self._memory_bytes / num_models, USES_PER_REQUEST, RECENT_USES, MINI_SHARE)

    def _count(self, requests: Sequence[EndedRequest], memories: dict[str, tuple[float, int]]) -> None:
        with self._lock:
            if self._now() - self._faded_s >= _FADE_S:
                self._faded_s = self._now()
                for model in self._models.values():
                    model.curve.fade(_KEPT)
            num_counted = 0
            for request in requests:
                found = self._model(request, memories)
                if found is not None:
                    found.add(request)
                    num_counted += 1
            for name, known in self._models.items():
                memory, _ = memories.get(name, (known.curve.memory_blocks, 0))
                if abs(memory - known.curve.memory_blocks) > 0.02 * known.curve.memory_blocks:
                    known.curve.resize(memory)
        self._counter.labels("counted").inc(num_counted)
        self._counter.labels("dropped").inc(len(requests) - num_counted)

    def _model(self, request: EndedRequest, memories: dict[str, tuple[float, int]]) -> _Model | None:
        """Return the model's curve, a new one if its blocks or the policy changed; None if there are too many."""
        found, policy = self._models.get(request.model), self._eviction or self.store.eviction or LRU
        if found is not None and (found.block_tokens, found.curve.policy) == (request.block_tokens, policy):
            return found
        if found is None and len(self._models) >= max(1, self._memory_bytes // MODEL_BYTES):
            return None
        bounds = self._bounds(len(self._models) + (found is None))
        if found is None:
            for other in self._models.values():
                other.curve.resize(other.curve.memory_blocks, bounds)
        memory, _ = memories.get(request.model, (0.0, 0))
        found = self._models[request.model] = _Model(
            ModelCurve(policy, memory, bounds), request.block_tokens, self._now()
        )
        return found

    def _look(self) -> list[dict[str, Any]]:
        with self._lock:
            found = [self._row(name, model) for name, model in self._models.items()]
        self._gauge.clear()
        for row in found:
            for policy, shares in row["tenants"]["*"]["shares"].items():
                for size, share in zip(SIZES, shares, strict=True):
                    self._gauge.labels(row["model"], policy, f"{size:g}").set(share)
        return found

    def _row(self, name: str, model: _Model) -> dict[str, Any]:
        curve, requests = model.curve, model.requests
        return {
            "model": name,
            "eviction": curve.policy,
            "sampling_rate": curve.rate,
            "block_tokens": model.block_tokens,
            "memory_blocks": round(curve.memory_blocks),
            "sizes": list(SIZES),
            "tenants": curves_as_json(curve),
            "requests": requests,
            "requests_per_s": requests / max(1e-9, self._now() - model.began_s),
            "mean": {key: total / requests for key, total in model.sums.items()},
        }


def curves_as_json(curve: ModelCurve) -> dict[str, dict[str, Any]]:
    """Return each tenant's curves, and under "*" those of all requests, as JSON: a share for each of SIZES."""
    return {
        tenant: {"prompt_tokens": round(found.prompt_tokens), "shares": found.shares}
        for tenant, found in curve.curves().items()
    }


def _numbers(blocks: Sequence[bytes]) -> Names:
    """Return the first eight bytes of each name, which is a hash and so evenly spread."""
    if not blocks:
        return np.empty(0, np.uint64)
    return np.frombuffer(b"".join([block[:8] for block in blocks]), "<u8")


def router(curves: LiveCurves) -> APIRouter:
    """Build the route."""
    api = APIRouter()

    @api.get("/debug/curve")
    async def curve() -> dict[str, Any]:
        """Return the share of prompt tokens that would be cached at other sizes of memory, by model and tenant."""
        return {"models": await curves.report(), "ssd_bytes": curves.store.ssd_bytes}

    return api
