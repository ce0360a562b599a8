"""The load of vLLM: its own figures of each step, and a book of requests whose prompts are not computed yet. Pure.

vLLM reports the number of running requests and the part of the cache in use, but not the number of waiting tokens; a
request's are those not cached on its arrival, until its first token shows that they are computed.
"""

from __future__ import annotations

from typing import Any

from msgspec import structs

from tanghulu.types import RequestId
from tanghulu.workers.engine.speed import SpeedMeter
from tanghulu.workers.engine.thread import EngineLoad


class LoadBook:
    """Requests from their submission to their end, and the latest figures of a cache of ``num_blocks``.

    ``max_num_seqs`` is the maximum number of requests that vLLM runs in one step.
    """

    def __init__(self, num_blocks: int, max_num_seqs: int) -> None:
        self._num_blocks, self._max_num_seqs = num_blocks, max_num_seqs
        self._waiting: dict[RequestId, int] = {}  # tokens to compute, of requests without a token yet
        self._started: set[RequestId] = set()
        self._speed = SpeedMeter(reads_peers=False)
        self._num_running = 0
        self._share_in_use = 0.0
        self.num_added = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._started)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._waiting or request_id in self._started

    def add(self, request_id: RequestId, num_tokens: int) -> None:
        """Add a request; ``num_tokens`` of its prompt are not cached."""
        assert request_id not in self, request_id
        self.num_added += 1
        self._waiting[request_id] = num_tokens

    def started(self, request_id: RequestId) -> None:
        """Note that the request has a token."""
        if self._waiting.pop(request_id, None) is not None:
            self._started.add(request_id)

    def ended(self, request_id: RequestId) -> None:
        """Note that the request has ended in any way."""
        self._waiting.pop(request_id, None)
        self._started.discard(request_id)

    def step(self, stats: Any) -> None:
        """Process vLLM's ``SchedulerStats`` of a step."""
        self._num_running = stats.num_running_reqs
        self._share_in_use = stats.kv_cache_usage
        details = stats.iteration_details
        if details is not None and not details.is_dummy and details.elapsed_ms > 0:
            num_tokens = details.num_ctx_tokens + details.num_generation_tokens
            num_requests = details.num_ctx_requests + details.num_generation_requests
            self._speed.step(num_tokens, num_requests, details.elapsed_ms / 1000)

    def load(self, num_cached: int) -> EngineLoad:
        """Return the current load; ``num_cached`` names are in the cache."""
        num_running = min(self._num_running, len(self))
        in_use = round(self._share_in_use * self._num_blocks) if len(self) else 0
        shared = structs.replace(
            self._speed.speeds,
            num_running=num_running,
            num_waiting=len(self) - num_running,
            blocks_total=self._num_blocks,
            blocks_free=self._num_blocks - in_use,
            prefill_tokens_waiting=sum(self._waiting.values()),
            max_num_seqs=self._max_num_seqs,
        )
        return EngineLoad(
            shared, blocks_cached=max(num_cached - in_use, 0), blocks_in_use=in_use, num_added=self.num_added
        )

    def check(self) -> None:
        assert not self._waiting.keys() & self._started
        assert len(self) <= self.num_added
