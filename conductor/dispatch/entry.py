"""The record of a request in progress, the limits on requests, and the protocol of explainers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tanghulu.conductor.dispatch.admission import Admission
from tanghulu.conductor.dispatch.deadlines import Deadlines
from tanghulu.conductor.dispatch.lifecycle import Flight, MoveLimits
from tanghulu.conductor.dispatch.queue import QueueOrder
from tanghulu.conductor.dispatch.request_counts import RequestCounts
from tanghulu.conductor.dispatch.router import RoutedRequest
from tanghulu.conductor.dispatch.token_stream import TokenStream
from tanghulu.conductor.routing.profiles import ProfileFile
from tanghulu.conductor.routing.requests import NO_TIMEOUTS, Timeouts
from tanghulu.conductor.stories.account import Explanation
from tanghulu.conductor.stories.recorder import EndedRequest
from tanghulu.conductor.stories.story import Story
from tanghulu.conductor.text.served_model import ServedModel
from tanghulu.session.outputs import PrefixHolder
from tanghulu.types import BlockHash, InstanceId


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on the conductor's load; ``profiles`` are the assumed costs until workers report theirs.

    ``timeouts`` are the upper limits for a request. A worker whose engine is silent for ``worker_timeout_s`` counts as
    lost; 0 disables that.
    """

    max_in_flight: int = 1024
    max_queued: int = 1024
    queue_timeout_s: float = 30.0
    moves: MoveLimits = field(default_factory=MoveLimits)
    admission: Admission = field(default_factory=Admission)
    order: QueueOrder = field(default_factory=QueueOrder)
    profiles: ProfileFile = field(default_factory=ProfileFile)
    hot_prefix_rate: float = 0.0
    timeouts: Timeouts = NO_TIMEOUTS
    worker_timeout_s: float = 0.0


@dataclass(slots=True, eq=False)
class RequestEntry:
    """A request in progress, with the data that only the dispatcher needs."""

    flight: Flight
    model: ServedModel
    stream: TokenStream
    story: Story
    counts: RequestCounts
    arrived_s: float
    deadlines: Deadlines
    wire_id: str = ""
    rest_tokens: int = 0
    holder: PrefixHolder | None = None
    #: Leading blocks held by each worker when the prefill began.
    holders: Mapping[InstanceId, int] = field(default_factory=dict)
    num_blocks: int = 0
    reserved: InstanceId | None = None
    #: Time since which workers have refused it, and number of refusals.
    refused_s: float | None = None
    num_refusals: int = 0
    not_before_s: float = 0.0
    deadline: asyncio.TimerHandle | None = None
    alarm: asyncio.TimerHandle | None = None
    #: What the dispatcher's ``explainer`` has recorded of it.
    asked: Any = None

    def shown(self, now_s: float) -> dict[str, Any]:
        """Return the request for people."""
        flight = self.flight
        return {
            "id": flight.request.id,
            "state": flight.state.name.lower(),
            "worker": flight.worker or "",
            "age_s": now_s - self.arrived_s,
            "prompt_tokens": len(flight.request.prompt),
            "cached_tokens": flight.cached_tokens or 0,
            "generated_tokens": len(flight.generated),
            "moved": flight.was_moved,
        }

    def as_ended(self, now_s: float) -> EndedRequest:
        """Return what recorders and curves need of it, when it has ended."""
        flight, request = self.flight, self.flight.request
        sequence = flight.sequence(lambda: self.model.empty_sequence(request.salt))
        return EndedRequest(
            time.time() - (now_s - self.arrived_s),
            len(request.prompt),
            len(flight.generated),
            sequence.block_hashes,
            sequence.block_tokens,
            request.session,
            request.model,
            request.tenant,
            flight.cached_tokens or 0,
            self.counts.ttft_s,
            self.counts.tbt_s,
        )


class PromptExplainer(Protocol):
    """Explains which tokens of prompts were computed, and why; called at each event that it needs to know of."""

    def joined(self, cached: Sequence[BlockHash]) -> None:
        """Record that a worker has joined with ``cached`` blocks."""

    def routed(self, before: Any, flight: Flight, model: ServedModel, route: RoutedRequest) -> Any:
        """Record that a request was routed; return its record, given as ``before`` if it is routed again."""

    def ended(self, asked: Any, flight: Flight, model: ServedModel, outcome: str) -> Explanation | None:
        """Explain a request that has ended, from its record; ``outcome`` is "" if it was served."""
